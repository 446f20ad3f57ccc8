"""The hooks through which `model.state_dict()` and `model.load_state_dict()` read and write the home."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from noria._errors import usage_error
from noria.contents import lines_of_model, refuse_others
from noria.custody.hooks import Hook
from noria.home import HomeParameter
from noria.ranks import raised_by_all

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["StateDicts"]


class StateDicts:
    """Of one wrap call's models."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self._handles: list[Any] = []
        self._loads: list[list[int]] = []  # units whose home a load_state_dict has opened
        for root in wrapped.partition.roots:
            for module in root.modules():
                self._install(module)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _install(self, module: nn.Module) -> None:
        if self.wrapped.ranks is not None:
            self._handles.append(module.register_load_state_dict_pre_hook(Hook(self._compare)))
        self._handles.append(module.register_load_state_dict_pre_hook(Hook(self._refuse_assign)))
        if module._buffers:
            self._handles.append(module.register_load_state_dict_pre_hook(Hook(self._note_buffers)))
        self._handles.append(module._register_state_dict_hook(Hook(self._give)))
        self._handles.append(module.register_load_state_dict_pre_hook(Hook(self._take)))
        self._handles.append(module.register_load_state_dict_post_hook(Hook(self._taken)))

    def _own(self, module: nn.Module) -> dict[str, HomeParameter]:
        """What of the home has a name there now: the user may have given one more name since the wrap."""
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        return {name: self.wrapped.slot_of[each] for name, each in own if each in self.wrapped.slot_of}

    def _give(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name, slot in self._own(module).items():
            if prefix + name not in state_dict or state_dict[prefix + name] is slot.parameter:
                continue  # left out, or asked for as it is (keep_vars)
            state_dict[prefix + name] = self.wrapped.values.current(slot)

    def _refuse_assign(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            raise usage_error(
                "load_state_dict(assign=False)",
                "assign=True, which would replace the parameters that noria holds",
                "leave assign out: values are copied into the home",
            )

    def _compare(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        """At the outermost module, before anything of it is written: torch gives the state dict of all of it."""
        slots = [self.wrapped.slot_of[each] for each in module.parameters() if each in self.wrapped.slot_of]
        is_outermost = not prefix or any(module is root for root in self.wrapped.partition.roots)
        if self.wrapped.ranks is None or not slots or not is_outermost:
            return
        self.wrapped.recover()
        self.wrapped.refuse_between_steps("model.load_state_dict()", mends=True)
        self.wrapped.together.meet(f'load "{slots[0].name}" and {len(slots) - 1} more')
        with raised_by_all([self.wrapped.ranks], "model.load_state_dict"):
            assign = bool(local_metadata.get("assign_to_params_buffers", False))
            lines = [f"assign={assign}", *lines_of_model(module, state_dict, prefix)]
        refuse_others([self.wrapped.ranks], lines)

    def _note_buffers(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.shape == buffer.shape:  # torch copies it
                self.wrapped.loaded.note((module, name))

    def _take(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        own = self._own(module)
        if not own:
            return
        self.wrapped.recover()
        self.wrapped.refuse_between_steps("model.load_state_dict()", mends=True)
        self.wrapped.together.meet(f'load "{prefix}{next(iter(own))}"')
        units = sorted({slot.unit for slot in own.values()})
        if self.wrapped.ranks is None:
            self.wrapped.custody.open_home(units, True)
            self._loads.append(units)
        else:
            for unit in units:
                self.wrapped.custody.access_home(unit, True)
        for name, slot in own.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.shape == slot.shape:
                self.wrapped.values.write(slot, value)
                self.wrapped.loaded.note(slot.index)
                # torch copies it onto itself
                state_dict[prefix + name] = (
                    self.wrapped.home.working(slot) if self.wrapped.ranks is None else slot.parameter
                )

    def _taken(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.end_loads()

    def end_loads(self) -> None:
        """torch copies a module's own values as soon as its pre-hooks return: what is open now is done. A loader that
        raised, or one that goes around `load_state_dict`, does not get here by itself."""
        while self._loads:
            self.wrapped.custody.close_home(self._loads.pop(), True)
