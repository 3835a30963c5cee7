"""`python -m netlayer` is the `netlayer` command."""

from netlayer.cli import main

main()
