"""Real text, tokenised once, sampled the same for any number of ranks."""
