"""`python -m trainer.inprocess MODULE ARGUMENTS`."""

import sys

from trainer.inprocess import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
