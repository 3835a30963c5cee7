"""Models of other programs: their names and shapes, Hugging Face's configurations, import and export."""
