"""Supports stages of `torch.distributed.pipelining`: follows their schedules, and lets them lend device memory."""
