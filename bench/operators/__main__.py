"""Entry of `python -m bench.operators`."""

from bench.operators.command import command
from netlayer.cli import run

if __name__ == "__main__":
    run(command, "python -m bench.operators")
