"""Saves and loads checkpoints: one file of plain tensors, or a folder of `torch.distributed.checkpoint`."""
