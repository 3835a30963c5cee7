"""The twin of nccl-tests: options, driver, timing, data checks and tables of `*_perf`."""
