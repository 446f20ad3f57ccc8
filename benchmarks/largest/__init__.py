"""The largest model that each system trains within limits: `python -m benchmarks.largest`."""
