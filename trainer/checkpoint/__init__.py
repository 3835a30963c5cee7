"""Checkpoints that any layout can resume from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from trainer.checkpoint.distcp import file_of as file_of
    from trainer.checkpoint.foreign.convert import export_checkpoint as export_checkpoint
    from trainer.checkpoint.foreign.convert import import_model as import_model
    from trainer.checkpoint.foreign.convert import model_in as model_in
    from trainer.checkpoint.foreign.convert import open_foreign as open_foreign
    from trainer.checkpoint.foreign.layouts import own_shapes as own_shapes
    from trainer.checkpoint.meta import Meta as Meta
    from trainer.checkpoint.meta import find as find
    from trainer.checkpoint.names import checkpoints_in as checkpoints_in
    from trainer.checkpoint.reader import open_checkpoint as open_checkpoint
    from trainer.checkpoint.reader import write_checkpoint as write_checkpoint
    from trainer.checkpoint.save import Failed as Failed
    from trainer.checkpoint.save import Published as Published
    from trainer.checkpoint.save import Saver as Saver
    from trainer.checkpoint.save import open_saver as open_saver
    from trainer.checkpoint.snapshot import ShardPlan as ShardPlan

__all__ = [
    "Failed",
    "Meta",
    "Published",
    "Saver",
    "ShardPlan",
    "checkpoints_in",
    "export_checkpoint",
    "file_of",
    "find",
    "import_model",
    "model_in",
    "open_checkpoint",
    "open_foreign",
    "open_saver",
    "own_shapes",
    "write_checkpoint",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Failed": ".save",
        "Meta": ".meta",
        "Published": ".save",
        "Saver": ".save",
        "ShardPlan": ".snapshot",
        "checkpoints_in": ".names",
        "export_checkpoint": ".foreign.convert",
        "file_of": ".distcp",
        "find": ".meta",
        "import_model": ".foreign.convert",
        "model_in": ".foreign.convert",
        "open_checkpoint": ".reader",
        "open_foreign": ".foreign.convert",
        "open_saver": ".save",
        "own_shapes": ".foreign.layouts",
        "write_checkpoint": ".reader",
    },
)
