"""Old name of `python -m congestion.simulation.page.fluid_page`, kept until 0.4."""

import runpy
import sys

NEW_NAME = "congestion.simulation.page.fluid_page"

if __name__ == "__main__":
    sys.stderr.write(f"warning: python -m congestion.fluid_page is now python -m {NEW_NAME}\n")
    runpy.run_module(NEW_NAME, run_name="__main__", alter_sys=True)
