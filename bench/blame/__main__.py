"""Entry of `python -m bench.blame`."""

from bench.blame.command import command
from netlayer.cli import run

if __name__ == "__main__":
    run(command, "python -m bench.blame")
