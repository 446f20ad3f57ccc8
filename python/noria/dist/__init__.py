"""Lets processes work together: groups, ranks that share a model, and tensors that are split over them."""
