"""What the code before the move wrote is read by today's: tests/data/before_move/README.md says how it was made."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives.small.table import TuningTable
from collectives.tensor.cublaslt import Shape
from collectives.tensor.gemm_choices import GemmChoices
from netlayer.config.file import load_config
from netlayer.config.renamed import with_new_keys
from netlayer.config.tree import build_config
from netlayer.results import load_frame, load_record
from trainer.checkpoint.meta import find
from trainer.loop import RankInfo, Trainer, run
from trainer.train import prepare

BEFORE = Path(__file__).parents[1] / "data" / "before_move"
EXPECTED = json.loads((BEFORE / "expected.json").read_text())


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_checkpoint_is_resumed_to_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(BEFORE / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)  # the job names its text by a relative path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = load_config(BEFORE / "job.toml").job
    meta = find(tmp_path)
    trainer = Trainer(job, prepare(job, 1, 7, tmp_path, resume=meta.path), 0, RankInfo(0, 1, torch.device("cpu")))
    trainer.resume(meta)
    steps: list[Mapping[str, Any]] = []
    evaluations: list[Mapping[str, Any]] = []
    run(trainer, job.evaluation, steps.append, evaluations.append, tmp_path / "out")
    trainer.close()
    # Sums of another kernel are rounded otherwise, and processors of one capability need not take the same kernels: two
    # differed in the seventh digit.
    within = {"rel": 1e-6, "abs": 0}
    assert [row["loss"] for row in steps] == pytest.approx(EXPECTED["losses"], **within)
    assert [row["grad_norm"] for row in steps] == pytest.approx(EXPECTED["grad_norms"], **within)
    assert evaluations[-1]["validation_loss"] == pytest.approx(EXPECTED["validation_loss"], **within)


@pytest.mark.parametrize("name", ["job", "every_key"])
def test_a_configuration_resolves_to_the_same_tree(name: str) -> None:
    before = with_new_keys(json.loads((BEFORE / f"{name}.json").read_text()))
    config = load_config(BEFORE / f"{name}.toml")
    assert build_config(before) == config
    now = dict(leaves(config.model_dump(mode="json")))
    assert {key: value for key, value in leaves(before) if now.get(key, "(gone)") != value} == {}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def test_a_record_has_its_rows_and_facts() -> None:
    record = load_record(BEFORE / "record.json")
    tree = json.loads((BEFORE / "record.json").read_text())
    assert json.loads(json.dumps(asdict(record))) == tree | {"config": with_new_keys(tree["config"])}
    assert (record.name, record.source) == ("train", "measured")
    frame = load_frame(BEFORE / "record.json", "measured")
    assert frame["loss"].dropna().tolist()[-2:] == EXPECTED["losses"]
    assert build_config(record.config) == load_config(BEFORE / "job.toml")


def test_tables_that_were_tuned_give_the_same_choices(tmp_path: Path) -> None:
    table = TuningTable.load(BEFORE / "small_table.json")
    assert [[*each, table.choose(*each)] for *each, _ in EXPECTED["small"]] == EXPECTED["small"]
    assert {path for *_, path in EXPECTED["small"]} == {"one_shot", "nccl"}
    (tmp_path / "products.json").write_bytes((BEFORE / "products.json").read_bytes())
    products = GemmChoices(tmp_path / "products.json")
    for rows, inner, columns, chosen in EXPECTED["products"]:
        operands = (torch.empty(size, device="meta") for size in ((rows, inner), (inner, columns), (rows, columns)))
        shape = Shape.of(*operands)
        assert shape is not None
        assert products.find(shape) == chosen
