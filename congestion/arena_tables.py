"""Old name of `python -m congestion.arena.tables`, kept until 0.4."""

import runpy
import sys

NEW_NAME = "congestion.arena.tables"

if __name__ == "__main__":
    sys.stderr.write(f"warning: python -m congestion.arena_tables is now python -m {NEW_NAME}\n")
    runpy.run_module(NEW_NAME, run_name="__main__", alter_sys=True)
