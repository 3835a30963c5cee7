"""Algorithms of products that were measured, kept for the next start: those of a 7B model take 20 s to measure.

A file for each kind of card with its torch and cublasLt, in the user's cache folder; whoever removes it has them
measured again. Ranks write it concurrently, each adding its choices to those in it: of two that write in the same
moment one's is measured again. A file that cannot be read or written is logged, and not used. Not covered: how one is
chosen.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from pathlib import Path

import torch

from collectives.tensor import cublaslt
from netlayer.cache import cache_folder
from netlayer.errors import ConfigError
from netlayer.results import write_text

logger = logging.getLogger(__name__)


class GemmChoices:
    """Algorithms by shape: each a text from `cublaslt.Gemm.to_text`, or empty for torch's own product.

    Args:
        path: of the file; None: nothing is kept.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._chosen = self._read()

    def find(self, shape: cublaslt.Shape) -> str | None:
        """None: nothing was chosen yet."""
        return self._chosen.get(_key(shape))

    def add(self, shape: cublaslt.Shape, chosen: str) -> None:
        """Keep it, also for others."""
        self._chosen[_key(shape)] = chosen
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps({**self._read(), **self._chosen}, indent=1))
        except (OSError, ConfigError) as exc:
            logger.info("algorithms of products are not kept for the next start: %s", exc)
            self._path = None

    def _read(self) -> dict[str, str]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            choices = json.loads(self._path.read_text(encoding="utf-8"))
            if not isinstance(choices, dict) or not all(isinstance(value, str) for value in choices.values()):
                raise ValueError("it is no table of texts")
        except (OSError, ValueError) as exc:
            logger.info("%s: what is kept there is measured again: %s", self._path, exc)
            return {}
        return choices


@functools.cache
def choices_of(device: torch.device) -> GemmChoices:
    """Return the choices for this GPU model, in the cache folder."""
    try:
        folder = cache_folder()
    except OSError as exc:
        logger.info("algorithms of products are not kept for the next start: %s", exc)
        return GemmChoices()
    card = torch.cuda.get_device_name(device).replace(" ", "_").replace("/", "_")
    name = f"products-{card}-torch{torch.__version__}-cublasLt{cublaslt.version()}.json"
    return GemmChoices(folder / name)


def _key(shape: cublaslt.Shape) -> str:
    """Return the shape as a key, without the device: GPUs of a model are alike.

    What 16-bit products do not have is not in theirs, so that files from before 8-bit products serve on.
    """
    parts = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    if shape.b_dtype == shape.dtype and not shape.fast:
        del parts["b_dtype"], parts["fast"]
    del parts["device"]
    return str([dataclasses.astuple(part) if isinstance(part, cublaslt.Operand) else part for part in parts.values()])
