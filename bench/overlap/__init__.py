"""`python -m bench.overlap`: how far each technique hides its communication behind computation."""
