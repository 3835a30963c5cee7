"""Settings of a cluster's layers in one profile, each with its evidence and the gain that is expected of it.

`netlayer tune plan` asks the planners that there are (NCCL's environment, NIC and switch profiles, the retransmit
timers, placement, the step's estimate, the model of a run's life, records of measurements) and changes nothing on the
machine. A value keeps its consumer's default where nothing carries a better one, and a gain without a figure is none.
"""

from bench.tune.profile import Gain, Profile, Setting, diff, read_profile

__all__ = ["Gain", "Profile", "Setting", "diff", "read_profile"]
