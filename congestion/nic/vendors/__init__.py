"""Settings of each vendor's NICs: files, and programs that set what no file sets."""
