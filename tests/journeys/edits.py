"""What a loop may do to its gradients between backward and step; each is given the side and the number of the step."""

from __future__ import annotations

from tests.journeys.pairs import Side


def replaced(side: Side, number: int) -> None:
    parameter = side.model.blocks[number % 5].expand.weight
    parameter.grad = parameter.grad * 0.5


def taken_away(side: Side, number: int) -> None:
    side.model.blocks[number % 5].norm.weight.grad = None
