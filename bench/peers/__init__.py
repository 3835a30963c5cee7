"""Other systems on the same work as ours, each at its best settings, written for the comparison."""
