"""Flows of a training job, or of a user's file."""
