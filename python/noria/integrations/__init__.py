"""Joins noria to frameworks, by their own conventions. Each module is imported on demand, and imports its framework."""
