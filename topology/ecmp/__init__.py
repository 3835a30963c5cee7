"""ECMP: hash functions, routes of flows, the load on links, and collisions."""
