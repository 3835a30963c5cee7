"""Entry of `python -m bench.init_time`."""

from bench.init_time.command import command
from netlayer.cli import run

if __name__ == "__main__":
    run(command, "python -m bench.init_time")
