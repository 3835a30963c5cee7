"""Format 4: what plain torch reads of it and writes for it, regions, damage; and format 3 by the same reader."""

from __future__ import annotations

import io
import pickle
import shutil
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from tests.trainer import layout_ranks, test_layouts
from tests.trainer.test_layouts import LLAMA
from trainer.checkpoint import dcp as format_4
from trainer.checkpoint.dcp import Box, boxes_of_range, frame, parse_metadata, small_boxes, state_name
from trainer.checkpoint.reader import Checkpoint, PlainCheckpoint, open_checkpoint, write_checkpoint
from trainer.model.gpt import build_model

MODEL = {"layers": 2, "hidden": 16, "heads": 2, "ffn_hidden": 32, "vocab_size": 50, "seq_len": 8}


def job_of(**model: object) -> JobConfig:
    return JobConfig.model_validate({"model": {**MODEL, **model}, "parallel": {"dp": 1}})


@pytest.fixture(autouse=True)
def _small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_4, "BOX_BYTES", 600)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """dcp says that a single process has no group, and that pickled metadata is what it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning)
        yield


def trained(job: JobConfig) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    model = build_model(job.model, 1, torch.device("cpu"))
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, job.optimizer.weight_decay), (False, 0.0))
    ]
    betas = job.optimizer.beta1, job.optimizer.beta2
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=betas, eps=job.optimizer.eps)
    for step in range(2):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * step + number)
        optimizer.step()
    return model, optimizer


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[state_name(name, key)] = optimizer.state[parameter][key]
    return tensors


@pytest.mark.parametrize("tied", [False, True])
def test_plain_torch_loads_it_into_a_model_and_its_optimiser(tmp_path: Path, tied: bool) -> None:
    job = job_of(tied_embeddings=tied)
    model, optimizer = trained(job)
    write_checkpoint(tmp_path / "step-000002", tensors_of(model, optimizer).items(), job, step=2)
    other, fresh = trained(job)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = {**other.state_dict(), "optimizer": get_optimizer_state_dict(other, fresh, options=flat)}
    dcp.load(state, checkpoint_id=tmp_path / "step-000002")
    set_optimizer_state_dict(other, fresh, state["optimizer"], options=flat)
    assert fresh.param_groups[0]["betas"] == (job.optimizer.beta1, job.optimizer.beta2)
    assert [group["weight_decay"] for group in fresh.param_groups] == [job.optimizer.weight_decay, 0.0]
    for (name, expected), value in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, value), name
        for key, kept in optimizer.state[expected].items():
            assert torch.equal(kept, fresh.state[value][key]), (name, key)


def test_torch_turns_it_into_one_file(tmp_path: Path) -> None:
    """`dcp_to_torch_save` knows no keys: it makes the nested state of what `.metadata` says."""
    job = job_of()
    model, optimizer = trained(job)
    write_checkpoint(tmp_path / "step-000002", tensors_of(model, optimizer).items(), job, step=2)
    dcp_to_torch_save(tmp_path / "step-000002", tmp_path / "one.pt")
    state = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(state["blocks.0.qkv.weight"], model.state_dict()["blocks.0.qkv.weight"])
    assert float(state["optimizer"]["state.blocks.0.qkv.weight.step"]) == 2


def test_what_dcp_has_saved_is_read(tmp_path: Path) -> None:
    job = job_of()
    model, optimizer = trained(job)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {**model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=flat)}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    with open_checkpoint(tmp_path / "theirs") as checkpoint:
        assert checkpoint.meta is None
        assert checkpoint.parameters() == list(model.state_dict())
        for name, value in tensors_of(model, optimizer).items():
            assert torch.equal(checkpoint.read(name), value), name
        assert not any(damage for _, damage in checkpoint.verify())
    file = tmp_path / "theirs" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-3000])
    with open_checkpoint(tmp_path / "theirs") as checkpoint:
        assert [name for name, damage in checkpoint.verify() if damage] == ["__0_0.distcp"]


def test_regions_are_those_of_the_whole(tmp_path: Path) -> None:
    job = job_of()
    whole = torch.arange(50 * 16.0).view(50, 16)
    tensors = {"embedding.tokens.weight": whole, "v": torch.arange(7.0), "n": torch.tensor(3.0), "e": torch.empty(0, 4)}
    write_checkpoint(tmp_path / "step-000000", tensors.items(), job)
    with open_checkpoint(tmp_path / "step-000000") as checkpoint:
        assert checkpoint.names() == list(tensors)
        for region in ((slice(3, 40), slice(2, 9)), (slice(49, 50),), (slice(None), slice(15, None)), (slice(4, 4),)):
            assert torch.equal(checkpoint.read("embedding.tokens.weight", region), whole[region])
        for name, value in tensors.items():
            assert torch.equal(checkpoint.read(name), value)
            assert (checkpoint.shape(name), checkpoint.dtype(name)) == (tuple(value.shape), torch.float32)
        before = checkpoint.bytes_read
        checkpoint.close()
        checkpoint.read("embedding.tokens.weight", (slice(0, 2),))
        assert 600 < checkpoint.bytes_read - before < 4000  # one box of 600 bytes, and not the file
        with pytest.raises(KeyError):
            checkpoint.read("nothing")


@given(st.lists(st.integers(0, 6), max_size=3), st.data())
def test_a_range_of_elements_is_a_few_boxes(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(start, whole.numel()))
    boxes = boxes_of_range("w", shape, whole.dtype, start, end)
    parts = [
        whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))].flatten() for box in boxes
    ]
    assert torch.equal(torch.cat([torch.empty(0), *parts]), whole.flatten()[start:end])


def test_no_box_is_larger_than_asked_for_unless_a_row_is() -> None:
    boxes = small_boxes(Box("w", (9, 5), torch.float32, (2, 0), (7, 5)), 45)
    assert [(box.offsets, box.sizes) for box in boxes] == [
        ((2, 0), (2, 5)),
        ((4, 0), (2, 5)),
        ((6, 0), (2, 5)),
        ((8, 0), (1, 5)),
    ]
    assert len(small_boxes(Box("w", (9, 5), torch.float32, (2, 0), (7, 5)), 7)) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("sizes", [(3, 5), (1,), (), (0, 4)])
def test_a_frame_around_elements_is_a_saved_tensor(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    value = (torch.rand(sizes) * 100).to(dtype)
    before, after = frame(dtype, sizes)
    content = before + format_4.elements_of(value).tobytes() + after
    assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), value)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    job = job_of()
    model, optimizer = trained(job)
    path = tmp_path / "step-000002"
    return write_checkpoint(path, tensors_of(model, optimizer).items(), job, step=2, tokenizer=b"{}")


def damaged(path: Path) -> dict[str, str]:
    with open_checkpoint(path) as checkpoint:
        return {name: damage for name, damage in checkpoint.verify() if damage}


def test_all_files_are_as_they_were_written(written: Path) -> None:
    with open_checkpoint(written) as checkpoint:
        assert dict(checkpoint.verify()) == dict.fromkeys(
            ("meta.json", ".metadata", "tokenizer.json", "__0_0.distcp"), ""
        )


@pytest.mark.parametrize("place", [0, 300, -100, -9, -1])
def test_a_flipped_bit_names_the_file(written: Path, place: int) -> None:
    content = bytearray((file := written / "__0_0.distcp").read_bytes())
    content[place] ^= 4
    file.write_bytes(content)
    assert list(damaged(written)) == ["__0_0.distcp"]


def test_a_cut_file_names_itself(written: Path) -> None:
    file = written / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    [(name, damage)] = damaged(written).items()
    assert name == "__0_0.distcp"
    assert "do not end in digests: it is cut short" in damage
    with open_checkpoint(written) as checkpoint, pytest.raises(ConfigError, match=r"__0_0\.distcp: is damaged"):
        checkpoint.read("head.norm.weight")


@pytest.mark.parametrize("file", [".metadata", "meta.json"])
def test_a_bit_in_what_describes_it_is_noticed_when_it_is_opened(written: Path, file: str) -> None:
    content = bytearray((written / file).read_bytes())
    content[60] ^= 1
    (written / file).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{file}: is damaged"):
        open_checkpoint(written)


def test_a_missing_file_is_named(written: Path) -> None:
    (written / "__0_0.distcp").unlink()
    with pytest.raises(ConfigError, match=r"lacks __0_0\.distcp"):
        open_checkpoint(written)


def test_one_of_ours_without_its_facts_is_not_taken_for_one_of_torch(written: Path, tmp_path: Path) -> None:
    """`meta.json` is written last: without it nobody knows whether the rest is whole. torch's own has none."""
    (written / "meta.json").unlink()
    with pytest.raises(ConfigError, match=r"lacks meta\.json, which its run has written last; take another"):
        open_checkpoint(written)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with open_checkpoint(tmp_path / "plain") as checkpoint:
        assert checkpoint.names() == ["w"]


def test_what_is_there_is_not_overwritten_and_a_failure_leaves_nothing(written: Path) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        write_checkpoint(written, [], job_of())

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(3)
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        write_checkpoint(written.with_name("step-000003"), failing(), job_of())
    assert [path.name for path in written.parent.iterdir()] == [written.name]


class _Runs:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("was run",)


@pytest.mark.parametrize("value", [_Runs(), 7, {"state_dict_metadata": {}}, shutil.rmtree])
def test_metadata_runs_nothing(value: object, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (pickle.dumps(value), pickle.dumps(value)[:-3], b"\x80\x04garbage", b""):
        with pytest.raises(ValueError, match=r"no metadata of torch\.distributed\.checkpoint"):
            parse_metadata(content)
    assert capsys.readouterr().out == ""


def test_metadata_that_points_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(4)}, checkpoint_id=tmp_path / "theirs")
    metadata = parse_metadata((tmp_path / "theirs" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../__0_0.distcp"
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(metadata))
    checkpoint: Checkpoint = PlainCheckpoint(tmp_path / "theirs", None, "--resume")
    with pytest.raises(ConfigError, match="is not in its folder"):
        checkpoint.read("w")


OLD = {**LLAMA, "layers": 2, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn_hidden": 16, "vocab_size": 31, "seq_len": 8}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of tp = 2 and pp = 2, as the last version before format 4 wrote it."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(Path(__file__).parents[1] / "data" / "format_3" / "tp2-pp2.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "step-000003"


def test_format_3_is_read_whole_from_the_parts_of_its_ranks(old: Path) -> None:
    expected = layout_ranks.train(test_layouts.job_of({}, OLD, {}), 0, 3).parameters
    expected.pop("head.tokens.weight", None)  # tied
    with open_checkpoint(old) as checkpoint:
        assert checkpoint.parameters() == list(expected)
        for name, value in expected.items():
            assert checkpoint.shape(name) == tuple(value.shape)
            torch.testing.assert_close(checkpoint.read(name), value, rtol=1e-8, atol=1e-11)
            assert checkpoint.shape(state_name(name, "exp_avg")) == tuple(value.shape)
        whole = checkpoint.read("blocks.1.qkv.weight")
        region = slice(5, 20), slice(3, 6)
        assert torch.equal(checkpoint.read("blocks.1.qkv.weight", region), whole[region])
        assert checkpoint.read("embedding.tokens.weight", (slice(14, 40),)).shape == (17, 8)


def test_format_3_becomes_format_4(old: Path, tmp_path: Path) -> None:
    with open_checkpoint(old) as before:
        assert before.meta is not None
        job = JobConfig.model_validate(before.meta.job)
        tensors = ((name, before.read(name)) for name in before.names())
        write_checkpoint(tmp_path / "step-000003", tensors, job, step=before.meta.step)
        with open_checkpoint(tmp_path) as after:
            assert [name for name in after.names() if not name.endswith(".step")] == before.names()
            for name in before.names():
                assert torch.equal(before.read(name), after.read(name))
            assert float(after.read(state_name("embedding.tokens.weight", "step"))) == 3


def test_damage_to_format_3_names_the_file(old: Path, tmp_path: Path) -> None:
    shutil.copytree(old, tmp_path / "step-000003")
    content = bytearray((file := tmp_path / "step-000003" / "tp1-pp0.safetensors").read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    assert list(damaged(tmp_path)) == ["tp1-pp0.safetensors"]
