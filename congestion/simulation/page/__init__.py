"""Pages of `netlayer simulate` and of the fluid model."""
