"""Old name of `python -m bench.mfu.page`, kept until 0.4."""

import runpy
import sys

NEW_NAME = "bench.mfu.page"

if __name__ == "__main__":
    sys.stderr.write(f"warning: python -m bench.mfu_page is now python -m {NEW_NAME}\n")
    runpy.run_module(NEW_NAME, run_name="__main__", alter_sys=True)
