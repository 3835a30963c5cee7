"""Commands `netlayer train` and `netlayer sample`, and what is shown before a run."""
