"""Runs the program that its first argument is, as `python -c` does; for `tests.forked`, which runs modules."""

import sys

if __name__ == "__main__":
    text = sys.argv.pop(1)
    sys.argv[0] = "-c"
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
