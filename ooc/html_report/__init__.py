"""A run, a trace or a plan as one HTML page. README.md has the order to read the files in."""
