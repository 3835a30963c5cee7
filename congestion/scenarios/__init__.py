"""Traffic patterns by name, and the fabrics that they run on."""
