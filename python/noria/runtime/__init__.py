"""Serves a wrapped model while it is used: weights and masters, late memory, loads, ranks that act together."""
