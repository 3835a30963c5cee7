"""`python -m bench.small_messages`: latency of small collectives, ours against NCCL's and torch's."""
