"""NCCL's environment for a job: its variables by release, what a job sets of them, and what an ACK timeout outlives."""
