"""`python -m bench.blame`: accuracy of `netlayer observe blame` on random jobs with an injected fault."""
