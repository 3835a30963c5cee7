"""`netlayer checkpoint ls|verify`: what a folder holds, and every damage by the name of its file."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from netlayer.errors import ConfigError
from tests.trainer.foreign_models import config_named, random_model, values_of
from tests.trainer.test_convert import assert_same, call, export, read_own, save_own, with_moments
from trainer.checkpoint.listing import Verification, list_checkpoints
from trainer.checkpoint.resume import AUTO, start_of

pytestmark = [
    pytest.mark.usefixtures("_no_sync"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # dcp's word for one process
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a good, a pending and a half checkpoint."""
    config = config_named("Llama")
    values = values_of(random_model(config))
    where = tmp_path / "run" / "checkpoints"
    save_own(where / "step-000005", config, with_moments(values), step=5)
    save_own(where / "step-000010", config, values, step=10).rename(where / "step-000010.new")
    (where / ".step-000015.part").mkdir()
    (where / ".step-000015.part" / "__0_0.distcp").write_bytes(bytes(1000))
    return tmp_path / "run"


def flip(file: Path, place: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 16
    file.write_bytes(content)


def test_ls_tells_good_from_pending_and_half(run: Path) -> None:
    rows = list_checkpoints(run)
    assert [(row.name, row.step, row.state, row.content) for row in rows] == [
        ("step-000005", 5, "good", "model, optimizer"),
        ("step-000010.new", 10, "pending", "model"),
        (".step-000015.part", None, "part", None),
    ]
    num_parameters = sum(tensor.numel() for tensor in values_of(random_model(config_named("Llama"))).values())
    assert {(row.num_parameters, row.format, row.layout) for row in rows[:2]} == {(num_parameters, 4, "tp 1, pp 1")}
    assert rows[0].size_bytes > 3 * 4 * num_parameters
    assert rows[2].size_bytes == 1000
    assert list_checkpoints(run / "checkpoints") == rows
    assert list_checkpoints(run / "checkpoints" / "step-000005") == rows[:1]


def test_ls_prints_a_table_or_json(run: Path) -> None:
    assert json.loads(call("ls", run, "--json", "-")) == [row.to_row() for row in list_checkpoints(run)]
    table = call("ls", run)
    assert "step-000005" in table
    assert "pending" in table


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("__0_0.distcp", "is damaged (its"),
        ("meta.json", "is damaged"),
        (".metadata", "is damaged (it is not as it was written)"),
    ],
)
def test_ls_sees_a_file_that_is_cut_short(run: Path, name: str, line: str) -> None:
    file = run / "checkpoints" / "step-000005" / name
    file.write_bytes(file.read_bytes()[:-20])
    damaged, pending, _half = list_checkpoints(run)
    assert (damaged.state, pending.state) == ("damaged", "pending")
    assert damaged.detail.startswith(line)
    with pytest.raises(ConfigError, match="is damaged") as caught:  # a run that resumes sees the same
        start_of(AUTO, run, {})
    assert caught.value.rule == damaged.detail
    file.unlink()
    assert list_checkpoints(run)[0].state == "damaged"


def test_ls_of_nothing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^DIR = .*: holds no checkpoint; give a run"):
        list_checkpoints(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere: is no folder"):
        list_checkpoints(tmp_path / "nowhere")


@pytest.mark.parametrize("file", ["__0_0.distcp", "meta.json", ".metadata", "tokenizer.json"])
@pytest.mark.parametrize("place", [0.1, 0.5])
def test_verify_names_the_file_of_a_flipped_bit(tmp_path: Path, file: str, place: float) -> None:
    config = config_named("Llama")
    tokenizer = json.dumps({"model": {"vocab": {"a": 0}}}).encode()
    path = save_own(tmp_path / "step-000001", config, values_of(random_model(config)), tokenizer=tokenizer)
    assert "all as they were written" in call("verify", path)
    flip(path / file, place)
    if file in ("meta.json", ".metadata"):  # which describe all others
        assert f"{file}: is damaged" in call("verify", path, code=2)
        return
    facts = json.loads(call("verify", path, "--json", "-", code=1))
    assert not facts["is_good"]
    assert [each["file"] for each in facts["files"] if each["damage"]] == [file]
    table = call("verify", path, code=1)
    assert file in table
    assert "not as it was written" in table


def test_an_object_store_is_listed_verified_and_exported(run: Path, tmp_path: Path) -> None:
    """Of fsspec's store in memory; there a pending checkpoint has a `meta.json.new`, and a half one has neither."""
    upath = pytest.importorskip("upath")
    where = upath.UPath("memory://bucket/run/checkpoints")
    for name, ending in (("step-000005", ""), ("step-000010", ".new"), ("step-000015", None)):
        for file in (run / "checkpoints" / "step-000005").iterdir():
            is_meta = file.name == "meta.json"
            if not is_meta or ending is not None:
                (where / name).mkdir(parents=True, exist_ok=True)
                (where / name / f"{file.name}{ending if is_meta else ''}").write_bytes(file.read_bytes())
    rows = json.loads(call("ls", "memory://bucket/run", "--json", "-"))
    assert [(row["name"], row["state"]) for row in rows] == [
        ("step-000005", "good"),
        ("step-000010", "pending"),
        ("step-000015", "part"),
    ]
    assert "all as they were written" in call("verify", "memory://bucket/run")
    call("export", "memory://bucket/run", tmp_path / "out", "--to", "huggingface")
    call("import", tmp_path / "out", tmp_path / "back", "--from", "huggingface")
    here, back = read_own(run), read_own(tmp_path / "back")
    assert_same({name: here[name] for name in back}, back)


def test_verify_reads_every_file_of_format_3(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[1] / "data" / "format_3" / "tp2-pp2.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    path = next(tmp_path.rglob("meta.json")).parent
    row = list_checkpoints(path)[0]
    assert (row.format, row.layout, row.content, row.state) == (3, "tp 2, pp 2", "model, optimizer", "good")
    assert "all as they were written" in call("verify", path)
    flip(path / "tp1-pp0.safetensors", 0.9)
    table = call("verify", path, code=1)
    assert "tp1-pp0.safetensors" in table
    assert "tp0-pp0.safetensors" not in table
    assert start_of(AUTO, tmp_path, {}, str(path.parent)).meta is not None  # which reads no tensor
    file = path / "tp1-pp0.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    assert list_checkpoints(path)[0].state == "damaged"
    with pytest.raises(ConfigError, match=r"tp1-pp0\.safetensors: is damaged"):
        start_of(AUTO, tmp_path, {}, str(path.parent))


@pytest.mark.parametrize("target", ["safetensors", "huggingface"])
def test_verify_of_an_export_compares_digests(run: Path, tmp_path: Path, target: Any) -> None:
    theirs = export(run, tmp_path / "out", target, None, 10_000)
    assert "all as they were written" in call("verify", theirs)
    file = sorted(theirs.glob("*.safetensors"))[-1]
    flip(file, 0.95)
    assert file.name in call("verify", theirs, code=1)


def test_verify_without_digests_says_so(run: Path, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "plain")
    assert "there are no digests to compare with" in call("verify", tmp_path / "plain")
    file = next((tmp_path / "plain").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    assert file.name in call("verify", tmp_path / "plain", code=1)


def test_verify_counts_what_it_has_read(run: Path) -> None:
    verification = Verification(run)
    assert verification.path.name == "step-000005"
    assert [check.damage for check in verification.checks()] == ["", "", ""]
    read = sum(tensor.nbytes for tensor in read_own(run).values())
    assert read < verification.bytes_read <= verification.total_bytes
