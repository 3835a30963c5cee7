"""The LLM stack over the layer."""
