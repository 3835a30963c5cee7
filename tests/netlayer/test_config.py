from pathlib import Path
from typing import Any

import pytest

from netlayer.config.file import load_config, to_toml
from netlayer.config.tree import Config, build_config
from netlayer.errors import ConfigError
from tests.netlayer.refusal import refusal


def test_the_paper_s_job_is_laid_out_as_published() -> None:
    config = load_config(Path("examples/megascale-12288.toml"))
    assert config.cluster.num_gpus == config.job.parallel.layout.world_size == 12_288
    assert (config.job.parallel.tp, config.job.parallel.pp, config.job.parallel.vpp) == (8, 8, 6)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("job.launch.backend=mpi", "must be one of 'auto', 'gloo' or 'nccl'"),
        ("job.data.validation_share=2", "must be below 1"),
        ("job.parallel.tp=3", "must divide job.model.heads = 4"),
        ("job.parallel.dp=1", "must equal cluster.servers x cluster.gpus_per_server = 2"),
        ("job.parallel.vpp=2", "job.parallel.pp = 1"),
        ("job.parallel.cp=3", "job.parallel.cp = 3: needs 2 x cp chunks of a sequence"),
        ("job.parallel.dp_replicate=2", "x job.parallel.dp x job.parallel.dp_replicate = 8 x 2 x 2"),
        ("job.parallel.dp_replicate=0", "job.parallel.dp_replicate = 0: must be at least 1"),
        ("job.model.layers=0", "must be at least 1"),
        ("job.model.layers=many", "job.model.layers = many"),
        ("job.model.heads=5", "must divide job.model.hidden = 128"),
        ("job.model.attention_window=4096", "job.model.seq_len = 128"),
        ("job.batch.global_batch_size=3", "multiple of job.batch.micro_batch_size x job.parallel.dp"),
        ("cluster.nic_bps=fast", "such as 200G"),
        ("cluster.nic_bps=800G", "cluster.switch_port_bps"),
        ("cluster.switch_radix=5000", "cluster.switch_radix = 5000: must be at most 4096"),
        ("cluster.nics_per_server=257", "must be at most 256"),
        ("cluster.nic_bps=1e16", "cluster.nic_bps"),
        ("cluster.prices.nic=-1", "cluster.prices.nic = -1"),
        ("cluster.rails=3", "must divide cluster.nics_per_server = 1"),
        ("job.optimizer.lr=nan", "job.optimizer.lr"),
        ("job.parallel.pp=8", "must divide job.model.layers = 4"),
    ],
)
def test_bad_values_get_one_line_that_names_the_rule(override: str, words: str) -> None:
    assert words in refusal(override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["job.optimizer.max_grad_norm=1"],
            "cannot be had with job.optimizer.max_grad_norm = 1; omit it, or change that",
        ),
        (["job.optimizer.max_grad_norm=0", "job.optimizer.name=lamb"], "cannot be had with job.optimizer.name = lamb;"),
        (["job.optimizer.max_grad_norm=0", "job.parallel.tp=2"], "cannot be had with job.parallel.tp = 2;"),
        (["job.optimizer.max_grad_norm=0", "job.parallel.pp=2"], "cannot be had with job.parallel.pp = 2;"),
        (
            ["job.optimizer.max_grad_norm=0", "job.loop.cuda_graph=true"],
            "cannot be had with job.loop.cuda_graph = true;",
        ),
    ],
)
def test_what_needs_all_gradients_keeps_steps_out_of_the_backward_pass(overrides: list[str], words: str) -> None:
    stepping = "job.overlap.step_in_backward=true"
    assert load_config(None, [stepping, "job.optimizer.max_grad_norm=0"]).job.overlap.step_in_backward
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


def test_every_key_has_a_description() -> None:
    def walk(section: type) -> None:
        for name, field in section.model_fields.items():  # type: ignore[attr-defined]
            assert field.description, name
            if hasattr(field.annotation, "model_fields"):
                walk(field.annotation)

    walk(Config)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"heads": 5}, r"job\.model\.heads = 5: must divide job\.model\.hidden = 12; .* or set job\.model\.head_dim"),
        ({"head_dim": 5}, r"positions = rotary: turns pairs, and a head has job\.model\.head_dim = 5 values; make it"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}},
            r"rope_scaling\.low_freq_factor = 4\.0: must be below high_freq_factor = 4;",
        ),
        ({"rope_scaling": {"factor": 8.0}}, r"rope_scaling\.factor = 8\.0: has no effect with rope_type = default;"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"job\.model\.rope_scaling\.rope_type = yarn: "),
        ({"norm_eps": 0.0}, r"job\.model\.norm_eps = 0\.0: must be above 0"),
    ],
)
def test_a_model_that_cannot_be_is_one_line(keys: dict[str, Any], said: str) -> None:
    tree = {"hidden": 12, "heads": 6, "positions": "rotary", **keys}
    with pytest.raises(ConfigError, match=said):
        build_config({"job": {"model": tree}})


def test_heads_of_a_width_of_their_own_need_not_divide_the_stream() -> None:
    model = build_config({"job": {"model": {"hidden": 14, "heads": 6, "kv_heads": 2, "head_dim": 4}}}).job.model
    assert (model.head_width, model.attention_width, model.kv_width) == (4, 24, 8)
    usual = build_config({"job": {"model": {"hidden": 12, "heads": 6}}}).job.model
    assert (usual.head_width, usual.attention_width, usual.kv_width) == (2, 12, 12)


def test_a_table_inside_a_section_comes_back_from_its_file(tmp_path: Path) -> None:
    config = load_config(None, ["job.model.preset=llama3-1b", "job.model.norm_eps=1e-6"])
    assert config.job.model.rope_scaling.factor == 32
    file = tmp_path / "job.toml"
    for describe in (False, True):
        file.write_text(to_toml(config, describe=describe))
        assert load_config(file) == config
