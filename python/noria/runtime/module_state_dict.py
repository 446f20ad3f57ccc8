"""Hooks `model.state_dict()` and `model.load_state_dict()`, so that they read and write the home."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from noria._errors import usage_error
from noria.dist.load_fingerprint import lines_of_model, refuse_others
from noria.dist.ranks import raised_by_all
from noria.model.inner_tensors import inner_tensors, is_wrapper, made_again, tensors_in
from noria.model.layout import HomeParameter
from noria.runtime.context import Context
from noria.runtime.hooks import Hook
from noria.runtime.load_tracker import LoadTracker
from noria.runtime.rank_sync import RankSync
from noria.runtime.state import RunState
from noria.runtime.weights import Weights, without_values

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["ModuleStateDicts"]


class ModuleStateDicts:
    """Installs these hooks on every module, and removes them."""

    def __init__(self, context: Context, run: RunState, sync: RankSync, weights: Weights, loads: LoadTracker) -> None:
        self.context = context
        self.run = run
        self.sync = sync
        self.weights = weights
        self.loads = loads
        self._handles: list[RemovableHandle] = []
        self._loads: list[int] = []  # for each module that load_state_dict has opened: what was open before it
        self._absent: dict[str, int] = {}  # names without an entry in the state dict that is loaded, and their slots
        self._first: set[int] = set()  # slots to which this load has given their first values
        run.on_settle.append(self.end_loads)
        for root in context.partition.roots:
            for module in root.modules():
                self._install(module)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _install(self, module: nn.Module) -> None:
        if self.context.ranks is not None:
            self._handles.append(module.register_load_state_dict_pre_hook(Hook(self._compare)))
        self._handles.append(module.register_load_state_dict_pre_hook(Hook(self._refuse_assign)))
        if module._buffers:
            self._handles.append(module.register_load_state_dict_pre_hook(Hook(self._note_buffers)))
        self._handles.append(module._register_state_dict_hook(Hook(self._give)))
        self._handles.append(module.register_load_state_dict_pre_hook(Hook(self._take)))
        self._handles.append(module.register_load_state_dict_post_hook(Hook(self._taken)))

    def _own(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the module's parameters at home, by name. The user may have added names since the wrap."""
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        return {name: each for name, each in own if each in self.context.slot_of}

    def _give(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
        for name, parameter in self._own(module).items():
            if prefix + name not in state_dict or state_dict[prefix + name] is parameter:
                continue  # not in the result, or the parameter itself (keep_vars)
            if is_wrapper(parameter) and self.weights.gives_parts:  # they make no wrapper
                del state_dict[prefix + name]
                for inner, tensor in inner_tensors(parameter, prefix + name):
                    state_dict[inner] = self.weights.current(self.context.slot_of[tensor])
            else:
                state_dict[prefix + name] = self.weights.current_of(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and (module, name) in self.loads.missing and prefix + name in state_dict:
                state_dict[prefix + name] = without_values(buffer.shape, buffer.stride(), buffer.dtype)

    def _refuse_assign(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, object], *_: object
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            raise usage_error(
                "load_state_dict(assign=False)",
                "assign=True, which would replace the parameters that noria holds",
                "leave assign out: values are copied into the home",
            )

    def _compare(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, object], *_: object
    ) -> None:
        """Compares what the ranks load, and raises on all of them if it differs.

        It runs at the outermost module, before any write: torch gives that module the whole state dict.
        """
        known = self.context.slot_of
        slots = [known[each] for each in tensors_in(module.parameters()) if each in known]
        is_outermost = not prefix or any(module is root for root in self.context.partition.roots)
        if self.context.ranks is None or not slots or not is_outermost:
            return
        self.run.recover()
        self.run.require_loadable("model.load_state_dict()")
        self.sync.meet(f'load "{slots[0].name}" and {len(slots) - 1} more')
        with raised_by_all([self.context.ranks], "model.load_state_dict"):
            assign = bool(local_metadata.get("assign_to_params_buffers", False))
            lines = [f"assign={assign}", *lines_of_model(module, state_dict, prefix)]
        refuse_others([self.context.ranks], lines)

    def _note_buffers(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            value = state_dict.get(prefix + name)
            if self._is_new(value, buffer, buffer.shape):  # torch copies the value
                self.loads.note((module, name))

    def _take(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        own = self._own(module)
        if not prefix:
            self._absent.clear()
            self._first.clear()
        if not own:
            return
        self.run.recover()
        self.run.require_loadable("model.load_state_dict()")
        self.sync.meet(f'load "{prefix}{next(iter(own))}"')
        units = sorted({self.context.slot_of[each].unit for each in tensors_in(own.values())})
        loaded = [parameter for name, parameter in own.items() if prefix + name in state_dict]
        frozen = any(not self.context.slot_of[each].trainable for each in tensors_in(loaded))
        self.weights.begin_load(units, frozen)
        apart = [unit for unit in units if self.context.ranks is not None or self.context.lies_apart(unit)]
        if shown := [unit for unit in units if unit not in apart]:
            self._loads.append(self.context.engine.home.num_open())
            self.context.engine.home.open_home(shown, True, frozen=frozen)
        for unit in apart:
            self.context.engine.home.access_home(unit, True, frozen)
        for name, parameter in own.items():
            value = state_dict.get(prefix + name)
            slot = self.context.slot_of[parameter]
            if value is None:
                self._absent[prefix + name] = slot.index
            if not self._is_new(value, parameter, parameter.shape if is_wrapper(parameter) else slot.shape):
                continue
            if is_wrapper(parameter):
                own_value: torch.Tensor = parameter
                if not self._take_inner(parameter, value):
                    continue  # torch refuses it
            else:
                own_value = parameter if slot.unit in apart else self.context.home.working(slot)
                self._take_value(slot, value)
            state_dict[prefix + name] = own_value  # torch copies the parameter onto itself

    def _take_value(self, slot: HomeParameter, value: torch.Tensor) -> None:
        if slot.index in self.loads.missing:
            self._first.add(slot.index)
        self.weights.write(slot, value)
        self.loads.note(slot.index)

    def _take_inner(self, parameter: nn.Parameter, value: torch.Tensor) -> bool:
        """Takes the values of the tensors inside a wrapper. Returns False if the wrapper's class refuses `value`."""
        copied = made_again(parameter, lambda own: torch.empty_like(own, device="cpu"))
        try:
            with torch.no_grad():
                copied.copy_(value)
        except Exception:  # torch gets the same when it copies, and tells all that were refused
            return False
        for own, taken in zip(tensors_in([parameter]), tensors_in([copied]), strict=True):
            self._take_value(self.context.slot_of[own], taken)
        return True

    @staticmethod
    def _is_new(value: object, own: torch.Tensor, shape: torch.Size) -> TypeGuard[torch.Tensor]:
        """Returns True if the entry of a state dict gives a parameter or buffer a value.

        torch itself refuses others. torch.distributed.checkpoint gives a model its own tensors for names that a file
        lacks.
        """
        return isinstance(value, torch.Tensor) and value.shape == shape and value is not own and not value.is_meta

    def _taken(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.end_loads()
        tied = {name for name, slot in self._absent.items() if slot in self._first}  # have values by another name
        incompatible_keys.missing_keys[:] = [name for name in incompatible_keys.missing_keys if name not in tied]

    def end_loads(self) -> None:
        """Closes all homes that loads have opened.

        torch copies a module's own values as soon as its pre-hooks return, so every open load is done. A loader that
        raised, or that bypasses `load_state_dict`, does not call this; the next use of the home does.
        """
        while self._loads:
            self.context.engine.home.close_home(self._loads.pop(), True)
