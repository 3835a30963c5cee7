"""Entry of `python -m bench.mfu`."""

from bench.mfu.command import command
from netlayer.cli import run

if __name__ == "__main__":
    run(command, "python -m bench.mfu")
