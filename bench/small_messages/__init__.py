"""`python -m bench.small_messages`: latency of small collectives, ours beside NCCL's and torch's."""
