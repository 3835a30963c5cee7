"""Measurements of the layer, and the verdict over them."""
