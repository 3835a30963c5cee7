"""Compilation of kernels: how they are compiled, kept, and what they ask of the machine."""
