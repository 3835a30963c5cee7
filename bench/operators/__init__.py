"""`python -m bench.operators`: implementations of each GPT operator compared."""
