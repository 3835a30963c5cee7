"""Entry of `python -m bench.overlap`."""

from bench.overlap.command import command
from netlayer.cli import run

if __name__ == "__main__":
    run(command, "python -m bench.overlap")
