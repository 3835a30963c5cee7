"""What holds for every test."""

import signal

from hypothesis import settings

# A shell without job control starts background jobs with SIGINT ignored, and programs that tests start would inherit
# it: Ctrl-C could then not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline judges the machine: on a loaded one, an example that is right takes longer than 200 ms.
settings.register_profile("netlayer", deadline=None)
settings.load_profile("netlayer")
