"""Failures of links, switches and rails, and the routes that survive them."""
