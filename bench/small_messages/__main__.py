"""Entry of `python -m bench.small_messages`."""

from bench.small_messages.command import command
from netlayer.cli import run

if __name__ == "__main__":
    run(command, "python -m bench.small_messages")
