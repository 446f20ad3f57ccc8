"""What torch of some versions cannot do by itself, and what tests leave out there, by name."""

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def from_torch(version: tuple[int, int], lack: str) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of a test that needs torch of `version`. `lack`: what older ones cannot do."""
    return () if version <= TORCH else (pytest.mark.skip(reason=f"torch {torch.__version__} {lack}"),)


GROWING = from_torch((2, 12), "refuses micro-batches of a pipeline that grow")
STAGES_OF_ONE_RANK = from_torch((2, 12), "asks gloo to send from a rank to itself between stages there")
