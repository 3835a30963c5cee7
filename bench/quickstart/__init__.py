"""`netlayer quickstart`: everything once, on this machine, ending in one report."""
