"""Name of `check_memory` until 0.2: it is a part of `trainer.plan`."""

from trainer.plan import check_memory as check_memory
