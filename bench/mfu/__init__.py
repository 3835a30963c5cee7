"""`python -m bench.mfu`: model FLOPs utilisation (MFU) of our trainer and of other systems."""
