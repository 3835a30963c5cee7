"""Entry of `python -m bench.convergence`."""

from bench.convergence.command import command
from netlayer.cli import run

if __name__ == "__main__":
    run(command, "python -m bench.convergence")
