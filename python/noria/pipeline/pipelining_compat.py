"""Recognizes and checks `PipelineStage`s of torch.distributed.pipelining that the user gives in place of modules.

When it runs, this file never imports torch.distributed.pipelining. If the user has a stage, it is imported already.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from noria._errors import usage_error
from noria._lists import as_list

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.pipelining.stage import _PipelineStageBase

__all__ = [
    "FOLLOWED",
    "check_stage",
    "is_stage",
    "module_of",
    "modules_of",
    "schedule_that_calls",
    "stages_of",
    "waits_for_sends",
]

# The methods of a stage that noria overrides, with the arguments that it reads.
FOLLOWED: dict[str, tuple[str, ...]] = {
    "clear_runtime_states": (),
    "forward_one_chunk": ("fwd_chunk_id",),
    "forward_maybe_with_nosync": (),
    "backward_one_chunk": ("bwd_chunk_id", "full_backward", "last_backward"),
    "scale_grads": ("grad_scale_factor",),
    "get_fwd_recv_ops": ("fwd_chunk_id",),
    "get_fwd_send_ops": ("fwd_chunk_id",),
}
_ATTRIBUTES = ("fwd_cache", "args_recv_info", "is_last", "has_backward", "device", "stage_index")


def is_stage(value: object) -> TypeGuard[_PipelineStageBase]:
    module = sys.modules.get("torch.distributed.pipelining.stage")
    base = getattr(module, "_PipelineStageBase", None)
    return base is not None and isinstance(value, base)


def module_of(value: object) -> Any:
    """Returns the module of a stage, and any other value unchanged."""
    return value.submod if is_stage(value) else value


def modules_of(values: object) -> Any:
    """Replaces stages with their modules, in one value or in a list."""
    return [module_of(each) for each in values] if isinstance(values, list | tuple) else module_of(values)


def stages_of(values: object) -> list[_PipelineStageBase]:
    return [each for each in as_list(values) if is_stage(each)]


def check_stage(stage: _PipelineStageBase, device: torch.device) -> None:
    """Raises UsageError if the stage cannot be followed. Runs before anything is changed."""
    if not isinstance(stage.submod, nn.Module):
        raise usage_error("a stage of a torch.nn.Module", type(stage.submod).__qualname__, "give the stage its module")
    for name, arguments in FOLLOWED.items():
        method = getattr(stage, name, None)
        known: Sequence[str] = () if method is None else [*inspect.signature(method).parameters]
        lacking = [each for each in arguments if each not in known]
        if method is None or lacking:
            _refuse(stage, f"without {name}()" if method is None else f"whose {name}() has no {', '.join(lacking)}")
    for name in _ATTRIBUTES:
        if not hasattr(stage, name):
            _refuse(stage, f"without {name}")
    theirs = torch.device(stage.device)
    if theirs.type != device.type or (theirs.index is not None and device.index not in (None, theirs.index)):
        raise usage_error(
            f"a stage that receives on {device}, where its layers compute",
            f"one on {theirs}",
            f"make the PipelineStage with {device}, or wrap with device=",
        )


def _refuse(stage: _PipelineStageBase, found: str) -> None:
    raise usage_error(
        "a stage as torch 2.11 to 2.13 make them",
        f"{type(stage).__name__} of torch {torch.__version__} {found}",
        'wrap the stage\'s module by itself, with update="auto"',
    )


def schedule_that_calls() -> _PipelineSchedule | None:
    """Returns the torch schedule that makes this call, or None if another loop makes it."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    frame = sys._getframe(1) if schedules is not None else None
    while frame is not None:
        if frame.f_code.co_filename == schedules.__file__:  # type: ignore[union-attr]
            caller = frame.f_locals.get("self")
            if hasattr(caller, "_n_microbatches") and hasattr(caller, "scale_grads"):
                return caller
        frame = frame.f_back
    return None


def waits_for_sends(schedule: object) -> bool:
    """Returns True if the schedule waits for all sends before each backward.

    Such a schedule also reads only the outputs of the last stage.
    """
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    own = [getattr(schedules, name, None) for name in ("ScheduleGPipe", "Schedule1F1B", "_ScheduleForwardOnly")]
    return any(type(schedule) is each for each in own if each is not None)
