"""The collectives of `*_perf`, one file each."""
