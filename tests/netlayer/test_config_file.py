import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.config.file import load_config, to_toml
from netlayer.config.tree import build_config
from netlayer.errors import ConfigError
from tests.netlayer.refusal import refusal

EXAMPLES = sorted(Path("examples").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_loads_and_survives_toml(path: Path) -> None:
    config = load_config(path)
    assert config.cluster.name == path.stem
    assert build_config(tomllib.loads(to_toml(config, describe=True))) == config


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
            "batch": {"global_batch_size": micro * dp * draw(st.integers(1, 3)), "micro_batch_size": micro},
            "optimizer": {"lr": draw(st.floats(1e-9, 1.0)), "name": draw(st.sampled_from(["adamw", "lamb"]))},
            "data": {"folder": draw(st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=20))},
        },
    }


@settings(max_examples=40)
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


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=3"])
def test_an_override_without_key_or_equals_sign_gets_one_line(override: str) -> None:
    assert "must read a.b=value" in refusal(override)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = " + "9" * 5000, r"is not TOML \(Exceeds the limit \(4300 digits\) for integer string conversion"),
        ("seed = " + "[" * 100_000, r"is not TOML \(it is nested too deep\)"),
        ("seed = " + "{a = " * 100_000, r"is not TOML \("),
    ],
)
def test_what_python_cannot_read_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(tmp_path / "job.toml")
    assert len(str(raised.value)) < 400


def test_a_preset_beside_sizes_of_the_file_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file's sizes go before it, so that the job has neither model; those that are set again do not count."""
    file = tmp_path / "job.toml"
    file.write_text("[job.model]\nlayers = 32\nhidden = 4096\nheads = 32\n")
    config = load_config(file, ["model.preset=llama3-70b", "model.hidden=8192"])
    assert (config.job.model.layers, config.job.model.hidden) == (32, 8192)
    assert "--set model.preset=llama3-70b: the file's layers = 32, heads = 32 stay" in caplog.text
    caplog.clear()
    load_config(file, ["model.preset=llama3-70b", "model.layers=80", "model.hidden=8192", "model.heads=64"])
    file.write_text('[job.model]\npreset = "llama3-70b"\nlayers = 8\n')
    load_config(file, ["model.seq_len=4096"])
    assert not caplog.text
