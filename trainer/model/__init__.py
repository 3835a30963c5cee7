"""The GPT, and its linears."""
