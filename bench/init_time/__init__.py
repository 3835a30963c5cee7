"""`python -m bench.init_time`: time until all process groups of a job exist."""
