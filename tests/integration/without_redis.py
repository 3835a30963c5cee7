"""Runs `netlayer` as on a machine that has no Redis server."""

import netlayer.store.meeting
from netlayer.cli import main

netlayer.store.meeting.find_redis_binary = lambda: None
main()
