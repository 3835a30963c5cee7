"""The stream that is current, at any place."""

from __future__ import annotations

import pytest
import torch

from collectives.transport import current_stream as module
from collectives.transport.current_stream import current_stream


def test_each_stream_is_made_an_object_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, made = [(0, 0, 1), (8, 0, 1), (0, 0, 1), (8, 0, 1), (0, 1, 1)], list[object]()

    def make(device: torch.device) -> object:
        made.append(device)
        return object()

    asked = iter(keys)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda _: next(asked), raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", make)
    monkeypatch.setattr(module, "_STREAMS", {})
    first, other, again, other_again, elsewhere = (current_stream(torch.device("cuda", key[1])) for key in keys)
    assert (again, other_again, len(made)) == (first, other, 3)
    assert elsewhere not in (first, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none")
def test_it_is_that_of_torch() -> None:
    device, side = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    for asked in (None, device, torch.device("cuda")):
        assert current_stream(asked) == torch.cuda.current_stream()
    with torch.cuda.stream(side):
        assert current_stream(device) == current_stream() == side
        assert current_stream(device).cuda_stream == side.cuda_stream
    graph, x = torch.cuda.CUDAGraph(), torch.ones(8, device=device)
    with torch.cuda.graph(graph):
        x += 1
        assert current_stream() == torch.cuda.current_stream()
    assert current_stream() == torch.cuda.current_stream() != side
