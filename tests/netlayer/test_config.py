import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.config import Config, build_config, load_config, to_toml
from netlayer.errors import ConfigError

EXAMPLES = sorted(Path("examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_loads_and_survives_toml(path: Path) -> None:
    config = load_config(path)
    assert config.cluster.name == path.stem
    assert build_config(tomllib.loads(to_toml(config, describe=True))) == config


def test_the_paper_s_job_is_laid_out_as_published() -> None:
    config = load_config(Path("examples/megascale-12288.toml"))
    assert config.cluster.num_gpus == config.job.parallel.layout.world_size == 12_288
    assert (config.job.parallel.tp, config.job.parallel.pp, config.job.parallel.vpp) == (8, 8, 6)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, object]:
    tp, pp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    micro = draw(st.integers(1, 4))
    return {
        "cluster": {
            "name": draw(st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=12)),
            "servers": pp * dp,
            "gpus_per_server": tp,
            "nic_bps": draw(st.sampled_from(["100G", "200G", 400_000_000_000])),
            "oversubscription": draw(st.floats(1, 8)),
        },
        "job": {
            "model": {"layers": 12 * pp, "heads": 4, "parallel_block": draw(st.booleans())},
            "parallel": {"tp": tp, "pp": pp, "dp": dp},
            "batch": {"global_size": micro * dp * draw(st.integers(1, 3)), "micro_size": micro},
            "optimizer": {"lr": draw(st.floats(1e-9, 1.0)), "name": draw(st.sampled_from(["adamw", "lamb"]))},
            "data": {"folder": draw(st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=20))},
        },
    }


@given(trees())
def test_config_to_toml_and_back_is_identity(tree: dict[str, object]) -> None:
    config = build_config(tree)
    assert build_config(tomllib.loads(to_toml(config))) == config
    assert build_config(config.model_dump()) == config


def test_overrides_win_over_the_file_and_a_unique_section_may_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[job.optimizer]\nsteps = 7\n")
    config = load_config(file, ["job.optimizer.steps=9", "overlap.dp=false", "data.folder=/some/where", "nic_bps=400G"])
    assert config.job.optimizer.steps == 9
    assert config.job.overlap.dp is False
    assert config.job.data.folder == "/some/where"
    assert config.cluster.nic_bps == 400_000_000_000


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("job.launch.backend=mpi", "must be one of 'auto', 'gloo' or 'nccl'"),
        ("job.data.validation_share=2", "must be below 1"),
        ("job.parallel.tp=3", "must divide job.model.heads = 4"),
        ("job.parallel.dp=1", "must equal cluster.servers x cluster.gpus_per_server = 2"),
        ("job.parallel.vpp=2", "job.parallel.pp = 1"),
        ("job.model.layers=0", "must be at least 1"),
        ("job.model.layers=many", "job.model.layers = many"),
        ("job.model.heads=5", "must divide job.model.hidden = 128"),
        ("job.model.attention_window=4096", "job.model.seq_len = 128"),
        ("job.batch.global_size=3", "multiple of job.batch.micro_size x job.parallel.dp"),
        ("cluster.nic_bps=fast", "such as 200G"),
        ("cluster.nic_bps=800G", "cluster.switch_port_bps"),
        ("cluster.switch_radix=5000", "cluster.switch_radix = 5000: must be at most 4096"),
        ("cluster.nics_per_server=257", "must be at most 256"),
        ("cluster.nic_bps=1e16", "cluster.nic_bps"),
        ("cluster.prices.nic=-1", "cluster.prices.nic = -1"),
        ("cluster.rails=3", "must divide cluster.nics_per_server = 1"),
        ("job.optimizer.lr=nan", "job.optimizer.lr"),
        ("job.parallel.pp=8", "must divide job.model.layers = 4"),
        ("steps", "must read a.b=value"),
        ("=3", "must read a.b=value"),
        ("a..b=3", "must read a.b=value"),
    ],
)
def test_bad_values_get_one_line_that_names_the_rule(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["job.optimizer.clip_norm=1"], "cannot be had with job.optimizer.clip_norm = 1; leave it out, or change that"),
        (["job.optimizer.clip_norm=0", "job.optimizer.name=lamb"], "cannot be had with job.optimizer.name = lamb;"),
        (["job.optimizer.clip_norm=0", "job.parallel.tp=2"], "cannot be had with job.parallel.tp = 2;"),
        (["job.optimizer.clip_norm=0", "job.parallel.pp=2"], "cannot be had with job.parallel.pp = 2;"),
        (["job.optimizer.clip_norm=0", "job.loop.cuda_graph=true"], "cannot be had with job.loop.cuda_graph = true;"),
    ],
)
def test_what_needs_all_gradients_keeps_steps_out_of_the_backward_pass(overrides: list[str], words: str) -> None:
    stepping = "job.overlap.step_in_backward=true"
    assert load_config(None, [stepping, "job.optimizer.clip_norm=0"]).job.overlap.step_in_backward
    with pytest.raises(ConfigError) as caught:
        load_config(None, [stepping, *overrides])
    assert words in str(caught.value)


def test_a_file_of_a_cluster_alone_needs_no_job(tmp_path: Path) -> None:
    file = tmp_path / "fabric.toml"
    file.write_text("[cluster]\nservers = 64\ngpus_per_server = 8\nnics_per_server = 8\nrails = 8\n")
    config = load_config(file)
    assert config.cluster.num_gpus == 512
    with pytest.raises(ConfigError, match="must equal"):
        config.check_world()
    with pytest.raises(ConfigError, match="must equal"):
        load_config(file, ["job.parallel.dp=1"])


def test_a_dump_holds_no_password() -> None:
    config = load_config(None, ["job.store.url=redis://:s3cret@host"])
    assert config.job.store.url == "redis://:s3cret@host"
    assert "s3cret" not in str(config.model_dump(mode="json"))


def test_bad_files_get_one_line(tmp_path: Path) -> None:
    corrupt, scalar, binary = tmp_path / "a.toml", tmp_path / "b.toml", tmp_path / "c.toml"
    corrupt.write_text("[cluster\n")
    scalar.write_text("job = 3\n")
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(corrupt)
    with pytest.raises(ConfigError, match="job = 3"):
        load_config(scalar)
    with pytest.raises(ConfigError, match="job is a value in the file"):
        load_config(scalar, ["job.name=x"])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(binary)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_every_key_has_a_description() -> None:
    def walk(section: type) -> None:
        for name, field in section.model_fields.items():  # type: ignore[attr-defined]
            assert field.description, name
            if hasattr(field.annotation, "model_fields"):
                walk(field.annotation)

    walk(Config)
