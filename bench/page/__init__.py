"""The page of a run, measured: a synthetic run of any size, and a browser that opens and pans it."""
