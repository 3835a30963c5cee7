"""Entry of `python -m bench.data_idle`."""

from bench.data_idle.command import command
from netlayer.cli import run

if __name__ == "__main__":
    run(command, "python -m bench.data_idle")
