"""What was measured once is kept for the next start, beside what others kept, and nothing depends on it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch

from collectives.tensor import cublaslt, gemm_choices
from collectives.tensor.cublaslt import Gemm, Shape
from collectives.tensor.gemm_choices import GemmChoices, choices_of


def shape_of(columns: int) -> Shape:
    """Without memory, and so always as aligned."""
    shape = Shape.of(*(torch.empty(size, device="meta") for size in ((2, 3), (3, columns), (2, columns))))
    assert shape is not None
    return shape


def test_what_processes_keep_side_by_side_stays(tmp_path: Path) -> None:
    file = tmp_path / "netlayer" / "products.json"
    first, second = GemmChoices(file), GemmChoices(file)
    first.add(shape_of(4), "aa")
    second.add(shape_of(5), "")
    third = GemmChoices(file)
    assert [third.find(shape_of(columns)) for columns in (4, 5, 6)] == ["aa", "", None]
    assert [path.name for path in file.parent.iterdir()] == ["products.json"]


def test_cards_of_a_kind_share_what_was_chosen() -> None:
    choices = GemmChoices()
    choices.add(shape_of(4), "aa")
    assert choices.find(dataclasses.replace(shape_of(4), device=torch.device("cuda", 3))) == "aa"


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', "\xff"])
def test_a_file_that_is_none_is_as_none_and_said(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "products.json"
    file.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.INFO):
        choices = GemmChoices(file)
    [record] = caplog.records
    assert "what is kept there is measured again" in record.getMessage()
    assert choices.find(shape_of(4)) is None
    choices.add(shape_of(4), "aa")
    assert list(json.loads(file.read_text()).values()) == ["aa"]


def test_where_nothing_can_be_kept_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    choices = GemmChoices(tmp_path / "file" / "products.json")
    with caplog.at_level(logging.INFO):
        for columns in (4, 5):
            choices.add(shape_of(columns), "aa")
    assert choices.find(shape_of(5)) == "aa"
    [record] = caplog.records
    assert "not kept for the next start" in record.getMessage()


def test_each_kind_of_card_has_a_file_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    choices_of.cache_clear()
    choices_of(torch.device("cpu")).add(shape_of(4), "aa")
    [file] = (tmp_path / "netlayer").iterdir()
    assert file.name == f"products-NVIDIA_H200-torch{torch.__version__}-cublasLt130100.json"
    choices_of.cache_clear()
    monkeypatch.setattr(gemm_choices, "cache_folder", mock.Mock(side_effect=OSError("there is no home folder")))
    assert choices_of(torch.device("cpu")).find(shape_of(4)) is None
    choices_of.cache_clear()


def test_an_algorithm_survives_its_text() -> None:
    algorithm = Gemm.from_text("0123456789abcdef" * 8)
    assert Gemm.to_text(algorithm) == "0123456789abcdef" * 8


@pytest.mark.parametrize("text", ["zz", "00", "00" * 65])
def test_what_is_no_algorithm_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"non-hexadecimal|bytes"):
        Gemm.from_text(text)
