"""Hosts and their RDMA devices: inventory, file tree, commands over ssh."""
