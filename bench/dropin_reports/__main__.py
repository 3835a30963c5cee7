"""Entry of `python -m bench.dropin_reports`."""

import sys

from bench.dropin_reports.command import main

if __name__ == "__main__":
    sys.exit(main())
