"""noria side by side with the rivals: `python -m benchmarks.versus`."""
