"""Commands of `netlayer bench`."""
