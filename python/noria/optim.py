"""Adds optimizers that torch.optim lacks. They are plain PyTorch, and train any model, wrapped or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["Lion"]


class Lion(Optimizer):
    """Runs Lion, evolved sign momentum (Chen et al. 2023, "Symbolic discovery of optimization algorithms", program 1).

    Each element moves by lr, against the sign of `beta1 * exp_avg + (1 - beta1) * grad`. Then `exp_avg` becomes
    `beta2 * exp_avg + (1 - beta2) * grad`. There is no other state. Weight decay is decoupled, as in AdamW. The paper
    recommends a learning rate 3 to 10 times smaller than AdamW's, and a decay larger by the same factor.

    `exp_avg` has the shape and dtype of its parameter.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate, a number or a tensor.
        betas: Two numbers in [0, 1).
        weight_decay: Each step multiplies parameters by `1 - lr * weight_decay` first.
        maximize: True moves along the gradient, not against it.

    Raises:
        ValueError: for nonsense numbers.

    Example:
        >>> optimizer = noria.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not float(lr) >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        for index, beta in enumerate(betas):
            if not 0.0 <= float(beta) < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients again, before the update.

        Returns:
            The value of `closure`, or None without one.

        Raises:
            RuntimeError: for sparse or complex gradients.

        Example:
            >>> optimizer = noria.optim.Lion(model.parameters(), lr=1e-4)
            >>> model(inputs).sum().backward()
            >>> optimizer.step()
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = -parameter.grad if group["maximize"] else parameter.grad
                if gradient.is_sparse or torch.is_complex(gradient):
                    raise RuntimeError("Lion does not support sparse or complex gradients")
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                moment = state["exp_avg"]
                direction = moment.lerp(gradient, 1 - float(beta1)).sign_()
                if group["weight_decay"] != 0:
                    parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(direction, alpha=-lr)
                moment.lerp_(gradient, 1 - float(beta2))
        return loss
