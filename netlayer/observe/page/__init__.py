"""The page of a run: heat map, timeline, 3D-parallel view, counters and the job's life, served or as one file.

`Columns` are what files hold, `run_of` their tables, `PageSource` answers the page's requests for data, and
`PageServer` serves them. The front end is in `web/`, built by npm into `web/dist/`. Needs no torch.
"""
