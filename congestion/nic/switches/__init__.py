"""Settings of switches that go with a NIC profile, by operating system and chip."""
