"""Hooks the user's modules. The hooks announce passes and visits, and move activations or compute them again."""
