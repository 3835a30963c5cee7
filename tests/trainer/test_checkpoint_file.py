"""A file of tensors: written, read, and refused in one line where its header was forged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.digest import digest
from trainer.checkpoint.file import TensorFile, TensorWriter, header_digest


def test_tensors_come_back(tmp_path: Path) -> None:
    path, w = tmp_path / "a.safetensors", torch.arange(6.0).view(2, 3)
    with TensorWriter(path, [("w", (2, 3)), ("none", (0, 4))], torch.float32, {"step": "3"}) as writer:
        writer.add("w", w)
        writer.add("none", torch.empty(0, 4))
    file = TensorFile(path, header_digest(path))
    assert torch.equal(file["w"], w)
    assert file["none"].shape == (0, 4)
    assert file.metadata["step"] == "3"


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 50_000,
        b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}",
        b"[1, 2]",
        b'{"__metadata__": {"crc32": ""}, "w": 3}',
        b'{"__metadata__": {"crc32": ""}, "w": {"dtype": "F32"}}',
        b'{"__metadata__": {"crc32": ""}, "w": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"__metadata__": {"crc32": ""}, "w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
        b'{"__metadata__": {"crc32": ""}, "w": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}',
        b'{"__metadata__": {"crc32": ""}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        b'{"__metadata__": {"crc32": 7}}',
        b'{"__metadata__": 7}',
        json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode(),
        b"\xff\xfe{}",
    ],
)
def test_forged_header_with_a_digest_that_fits(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="its header is not that of a file of tensors"):
        TensorFile(path, digest(header))
