"""Readers of logs that exist already: each file's tool is recognised by its content, its figures and findings read."""
