"""A run's life: failures, detection, restarts, standbys and checkpoints, and what share of the time it trains.

`netlayer run whatif` sets the event model (`bench.life.model`) beside the closed form (`bench.life.closed_form`), on
published runs (`bench.life.cases`) and on the user's cluster, and ranks policies (`bench.life.policies`).
"""
