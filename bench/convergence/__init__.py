"""`python -m bench.convergence`: held-out loss over tokens and over time, on real text."""
