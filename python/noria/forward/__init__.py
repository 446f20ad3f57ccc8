"""Hooks the user's modules: hooks announce passes and visits, and decide where activations go."""
