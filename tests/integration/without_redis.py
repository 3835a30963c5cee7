"""Runs `netlayer` as on a machine that has no Redis server, with few sizes in quickstart's bench and one seed."""

from dataclasses import replace

import netlayer.store.meeting
from bench.quickstart import command
from netlayer.cli import main

netlayer.store.meeting.find_redis_binary = lambda: None
command._SIZES = {backend: replace(sizes, max_bytes=1 << 12) for backend, sizes in command._SIZES.items()}
command._SEEDS = 1
main()
