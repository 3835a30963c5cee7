"""What holds for every test."""

import signal

# A shell without job control starts background jobs with SIGINT ignored, and programs that tests start would inherit
# it: Ctrl-C could then not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
