"""Commands of `netlayer nic`."""
