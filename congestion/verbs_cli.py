"""Old name of `python -m congestion.nic.commands.verbs`, kept until 0.4."""

import runpy
import sys

NEW_NAME = "congestion.nic.commands.verbs"

if __name__ == "__main__":
    sys.stderr.write(f"warning: python -m congestion.verbs_cli is now python -m {NEW_NAME}\n")
    runpy.run_module(NEW_NAME, run_name="__main__", alter_sys=True)
