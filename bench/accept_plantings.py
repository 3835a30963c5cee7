"""Old name of `python -m bench.accept_faults`, kept until 0.5."""

import runpy
import sys

NEW_NAME = "bench.accept_faults"

if __name__ == "__main__":
    sys.stderr.write(f"warning: python -m bench.accept_plantings is now python -m {NEW_NAME}\n")
    runpy.run_module(NEW_NAME, run_name="__main__", alter_sys=True)
