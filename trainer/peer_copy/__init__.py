"""Checkpoints in the memory of the run's machines: a store on each, and a file system (`peers://`) over all of them."""
