"""Sends `step()` and related calls of the user's optimizer to a `StepDriver`. The object stays the same.

`facade(optimizer)` changes the object's class to a subclass of its own class. So schedulers, scalers and trainers that
hold the object still work. Pickles find these classes here by name, such as `noria.optimizer.NoriaAdamW`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from noria import optim
from noria._errors import usage_error
from noria.model.optimizer_classes import name_original, original_class, step_of
from noria.torch_state import refuse_inside_backward

if TYPE_CHECKING:
    from noria.runtime.unread_tensors import UnreadTensors
    from noria.step.driver import StepDriver

__all__ = [
    "as_plain",
    "check_optimizer",
    "driver_of",
    "facade",
    "for_file",
    "refuse_kept_methods",
    "seen_through",
    "unfacade",
]


class WrappedOptimizer(Optimizer):
    """Overrides methods of the user's optimizer class. Without `_noria` (unpickled, unwrapped) it changes nothing."""

    _noria: StepDriver | None = None

    # Not compiled, because the home changes outside the code that the compiler traces.
    @torch._disable_dynamo
    def _step(self, closure: Callable[[], object] | None = None) -> object:
        """Updates all parameters that have a gradient. Updates may run later, but before the weights are used.

        Args:
            closure: Computes the loss again, as for the optimizer's own class.

        Returns:
            The value of `closure`, or None without one.

        Raises:
            UsageError: inside backward, or if parameters have no values yet. Under update="backward" also if
                hyperparameters or gradients were changed after backward began.

        Example:
            >>> model, optimizer = noria.wrap(model, optimizer)
            >>> model(inputs).sum().backward()
            >>> optimizer.step()
        """
        if self._noria is None:
            own = step_of(original_class(type(self)))
            return own(self) if closure is None else own(self, closure)
        self._opt_called = True  # LR schedulers read this
        result = self._noria.step(closure)
        self._noria.end_step()  # of the driver that it has now: a closure's forward may wrap anew
        return result

    step: Any = Optimizer.profile_hook_step(_step)
    step.hooked = True
    step._wrapped_by_lr_sched = True

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, as the optimizer's own class does.

        Args:
            set_to_none: False makes them zero.

        Raises:
            UsageError: inside backward, and for `set_to_none=False` under update="backward".

        Example:
            >>> model, optimizer = noria.wrap(model, optimizer)
            >>> model(inputs).sum().backward()
            >>> optimizer.zero_grad()
            >>> model[0][0].weight.grad is None
            True
        """
        if self._noria is not None:
            refuse_inside_backward("optimizer.zero_grad()")
            self._noria.run.recover()
            if self._noria.in_backward and not set_to_none:
                raise usage_error(
                    'zero_grad(set_to_none=True) under update="backward"',
                    "set_to_none=False, which wants gradients of zero",
                    "leave set_to_none out",
                )
        super().zero_grad(set_to_none)

    def _optimizer_step_code(self) -> None:
        """Hides a step from torch's profiler, which would look at the parameters: they are evicted."""
        if self._noria is None:
            super()._optimizer_step_code()

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Marks a backward that no `step()` follows.

        Only update="backward" needs it. The first such block takes memory for all gradients. With other values of
        `update` it changes nothing.

        Returns:
            A context manager for the block with that backward.

        Example:
            >>> model, optimizer = noria.wrap(model, optimizer, update="backward")
            >>> with optimizer.accumulate():
            ...     model(inputs).sum().backward()
        """
        return contextlib.nullcontext() if self._noria is None else self._noria.accumulate()

    @torch._disable_dynamo
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clips as `torch.nn.utils.clip_grad_norm_` on this optimizer's parameters, up to the order of summation.

        It is faster than torch's function. The host computes the norm while gradients land, and noria writes gradients
        only if the norm exceeds `max_norm`. After `unwrap` it is torch's function.

        Args:
            max_norm: The largest norm that is left.
            norm_type: The p of the p-norm.
            error_if_nonfinite: True raises if the norm is NaN or infinite.

        Returns:
            The norm before clipping, without dimensions. It is fp32, also for gradients in bfloat16, but fp64 if some
            gradients are fp64.

        Raises:
            RuntimeError: if torch's function would raise it.
            UsageError: under update="backward". If ranks share the model, also if `norm_type` is not 2.

        Example:
            >>> model, optimizer = noria.wrap(model, optimizer)
            >>> model(inputs).sum().backward()
            >>> norm = optimizer.clip_grad_norm_(1.0)
        """
        if self._noria is None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        return self._noria.clip_grad_norm_(float(max_norm), norm_type, error_if_nonfinite)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of the gradients before clipping, at the last `step()`. None without `max_grad_norm`."""
        return None if self._noria is None else self._noria.grad_norm

    def state_dict(self) -> dict[str, Any]:
        """Returns what torch's method would return, with tensors on the CPU.

        Raises:
            UsageError: while weights and optimizer state are of different steps.

        Example:
            >>> model, optimizer = noria.wrap(model, optimizer)
            >>> model(inputs).sum().backward()
            >>> optimizer.step()
            >>> optimizer.state_dict()["state"][0]["step"]
            tensor(1.)
        """
        return super().state_dict() if self._noria is None else self._noria.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this optimizer or of a plain one into the home.

        Args:
            state_dict: What `state_dict()` has returned.

        Raises:
            UsageError: between a backward and its `step()` under update="backward". Also if ranks that share the model
                load different states.

        Example:
            >>> model, optimizer = noria.wrap(model, optimizer)
            >>> optimizer.load_state_dict(optimizer.state_dict())
        """
        if self._noria is None:
            super().load_state_dict(state_dict)
        else:
            self._noria.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's method does.

        Args:
            param_group: The parameters under "params", and their hyperparameters.

        Raises:
            UsageError: if noria cannot update these parameters, for example because no wrapped model has them. Also if
                they were frozen until now, and the memory to train them does not fit. The group is then not added.

        Example:
            >>> optimizer = torch.optim.AdamW(model[:4].parameters())
            >>> model, optimizer = noria.wrap(model, optimizer)
            >>> optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 1e-4})
        """
        if self._noria is None:
            super().add_param_group(param_group)
        else:
            self._noria.add_param_group(param_group)


_FACADES: dict[type[Optimizer], type[Optimizer]] = {}


def _facade_class(cls: type[Optimizer]) -> type[Optimizer]:
    if cls not in _FACADES:
        name = f"Noria{cls.__name__}"
        made = type(name, (WrappedOptimizer, cls), {"__module__": __name__, "__doc__": cls.__doc__})
        made.__name__ = cls.__name__  # loggers call what they log after it; pickle goes by the qualified name
        globals()[name] = _FACADES[cls] = made
        name_original(made, cls)
    return _FACADES[cls]


def __getattr__(name: str) -> type[Optimizer]:
    """Returns classes such as NoriaAdamW by name, for unpickling in a new process."""
    own = name.removeprefix("Noria")
    original = getattr(torch.optim, own, None) or getattr(optim, own, None) if name.startswith("Noria") else None
    if original is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _facade_class(original)


def seen_through(optimizer: Any) -> Any:
    """Returns the optimizer in a wrapper, such as accelerate's, that passes all calls on to its `optimizer`."""
    while isinstance(optimizer, Optimizer) and "param_groups" not in vars(optimizer):
        inner = vars(optimizer).get("optimizer")
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


@contextlib.contextmanager
def for_file(optimizer: object, unread: UnreadTensors | None = None) -> Iterator[None]:
    """Has `state_dict()` of a wrapped optimizer keep codes of moments, as files have them, inside the `with` block.

    `unread` makes stand-ins for state that lies in files. Only `torch.save` may use them, before the next step.
    """
    driver = driver_of(optimizer)
    if driver is None:
        yield
        return
    before, driver.writes_file, driver.unread = (driver.writes_file, driver.unread), True, unread
    try:
        yield
    finally:
        driver.writes_file, driver.unread = before


def driver_of(optimizer: object) -> StepDriver | None:
    """Returns what drives a wrapped optimizer, also one in a wrapper. None for anything else."""
    inner = seen_through(optimizer)
    return inner._noria if isinstance(inner, WrappedOptimizer) else None


def refuse_kept_methods(wrapper: Any, optimizer: Optimizer) -> None:
    """Raises UsageError if a wrapper of the optimizer would call methods that the optimizer had before `wrap`."""
    if wrapper is optimizer:  # schedulers give it methods of its own
        return
    if any(isinstance(kept, MethodType) and kept.__self__ is optimizer for kept in vars(wrapper).values()):
        name = type(wrapper).__name__
        raise usage_error(
            "an optimizer, or a wrapper of one that looks up its methods when it calls them",
            f"one ({name}) that has kept some, as accelerate's does for a GradScaler",
            f"give noria.wrap the optimizer itself, before the {name} is made from it",
        )


def check_optimizer(optimizer: object) -> None:
    """Raises UsageError if the optimizer cannot be wrapped. Order: before anything is changed."""
    if not isinstance(optimizer, Optimizer):
        raise usage_error("a torch.optim.Optimizer", type(optimizer).__qualname__, "wrap optimizers of torch.optim")
    if isinstance(optimizer, WrappedOptimizer):
        if optimizer._noria is not None:
            raise usage_error("an optimizer that is not wrapped", "one that is", "noria.unwrap it first")
        optimizer.__class__ = original_class(type(optimizer))  # type: ignore[assignment]  # a copy of one that was
    if type(optimizer) is torch.optim.SparseAdam:
        raise usage_error("dense gradients", "SparseAdam, which wants sparse ones", "use Adam and sparse=False")
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        raise usage_error(
            "an optimizer whose step() is its class's own", "one replaced on the object", "replace it after noria.wrap"
        )
    try:
        optimizer._noria = None  # type: ignore[attr-defined]
        del optimizer._noria  # type: ignore[attr-defined]
    except AttributeError as error:
        raise usage_error(
            "an optimizer that takes an attribute, by which its class finds noria",
            f"{type(optimizer).__name__}, which does not ({error})",
            "let its __setattr__ pass what it does not know",
        ) from error
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable") or group.get("capturable"):
            raise usage_error(
                "optimizer groups without differentiable and capturable",
                f"group {number} with one of them",
                "leave them out: updates run on the host",
            )


def facade(optimizer: Optimizer, driver: StepDriver) -> None:
    """Sends `optimizer.step()` and related calls to `driver` from now on.

    It removes a scheduler's patch of the object, because the new class's step itself tells the scheduler of each call.
    """
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = _facade_class(
        type(optimizer) if not isinstance(optimizer, WrappedOptimizer) else original_class(type(optimizer))
    )
    optimizer._noria = driver  # type: ignore[attr-defined]
    # If it is False, a scaler unscales p.grad itself.
    optimizer._step_supports_amp_scaling = driver.takes_factor()  # type: ignore[attr-defined]


@contextlib.contextmanager
def as_plain(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Gives wrapped optimizers their own class inside the block, for code that chooses by class."""
    classes = [(each, type(each)) for each in optimizers]
    try:
        for each, cls in classes:
            if isinstance(each, WrappedOptimizer):
                each.__class__ = original_class(cls)  # type: ignore[assignment]
        yield
    finally:
        for each, cls in classes:
            each.__class__ = cls


def unfacade(optimizer: Optimizer, state: dict[Any, Any]) -> None:
    """Makes the object a plain optimizer again, with this state."""
    driver: StepDriver = optimizer._noria  # type: ignore[attr-defined]
    optimizer._step_supports_amp_scaling = driver.scaled_by_class  # type: ignore[attr-defined]
    del optimizer._noria  # type: ignore[attr-defined]
    optimizer.__class__ = original_class(type(optimizer))
    optimizer.state = defaultdict(dict, state)
    optimizer._patch_step_function()
