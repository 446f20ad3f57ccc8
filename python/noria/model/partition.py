"""Divides a model into units, which move together, and finds the modules whose calls announce units.

Blocks are the children of the model's outermost big lists, or the modules that the caller names. All other parameters
are grouped by module. Units are never nested. Every Parameter belongs to exactly one unit: the first in module order
that names it.

Order: units and hooks follow `named_modules()`, so the same model always gives the same numbers.
Ownership: a Partition refers to the caller's modules and parameters, and changes nothing.

Note [Called modules]. A hook fires only on a module that is called. A ModuleList, ModuleDict, ParameterList or any
module without its own `forward` is never called, so it is no unit and has no hook. Its children take its place. Its
own parameters count as direct parameters of the nearest called module above it.

Note [Lists in lists]. In Sequential(embedding, Sequential(*blocks), head) the inner list is the repeated one. So if a
child of a list is a list too, with more than half of its parameters, only the inner list counts.
"""

from __future__ import annotations

import bisect
import dataclasses
import fnmatch
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import torch
from torch import nn

from noria._errors import usage_error
from noria.model.inner_tensors import flaw_of_wrapper, inner_tensors, is_wrapper, tensors_in
from noria.model.quantised import flaw_of_quantised

__all__ = ["HookSpec", "Partition", "UnitSpec", "partition", "parts_of", "split_units"]


@dataclasses.dataclass(frozen=True)
class UnitSpec:
    """Lists parameters that move together. A wrapper is replaced by the tensors inside it.

    `module`: the block or subtree that holds them. None for direct ones: those of a module around other units.
    """

    name: str
    parameters: list[torch.Tensor]
    names: list[tuple[str, ...]]
    """All names of each parameter in the models. A tied parameter has more than one."""
    is_block: bool
    module: nn.Module | None


@dataclasses.dataclass(frozen=True)
class HookSpec:
    """Names a module whose call is announced. `needs`: the units it computes with, as indices into
    `Partition.units`, sorted."""

    name: str
    module: nn.Module
    needs: tuple[int, ...]
    is_block: bool


@dataclasses.dataclass(frozen=True)
class Partition:
    """Holds the units of the models in `roots`, and the modules to hook."""

    units: list[UnitSpec]
    hooks: list[HookSpec]
    roots: list[nn.Module]


def partition(
    models: nn.Module | Sequence[nn.Module],
    units: str | Sequence[type[nn.Module] | str] = "auto",
    split: Container[nn.Module] = (),
) -> Partition:
    """Finds the units and hooks of one model or several. With several, names start with "0.", "1.", ...

    Args:
        models: One model, or a sequence.
        units: As in `Policy.units`. Patterns are matched with each model's own module names.
        split: Modules that are too large for a unit. `parts_of` each of them are blocks.

    Raises:
        UsageError: for parameters that cannot be moved (sparse, lazy, overlapping, of another type). Also for a class
            or pattern that matches no module with parameters.
    """
    roots = [models] if isinstance(models, nn.Module) else list(models)
    prefixes = [""] if len(roots) == 1 else [str(index) for index in range(len(roots))]
    names: dict[torch.Tensor, list[str]] = {}
    buffers: list[tuple[str, torch.Tensor]] = []
    for root, prefix in zip(roots, prefixes, strict=True):
        buffers.extend(root.named_buffers(prefix=prefix))
        for name, parameter in root.named_parameters(prefix=prefix, remove_duplicate=False):
            _refuse_flaw(name, flaw_of_wrapper(parameter))
            for inner, tensor in inner_tensors(parameter, name):
                names.setdefault(tensor, []).append(inner)
    _refuse_immovable(names, buffers)
    blocks = _auto_blocks(roots) if isinstance(units, str) else _chosen_blocks(roots, units)
    builder = _Builder(_outermost_whole(roots, blocks, split))
    for root, prefix in zip(roots, prefixes, strict=True):
        builder.add_root(root, prefix)
    return builder.finish(roots, prefixes, names)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Returns the modules into which a module can be split: the outermost called ones below it. Empty: it stays whole.

    torch's own modules stay whole, and what is derived from them: some use the weights of modules inside them without
    calling these. So do compiled modules, whose graphs hooks would cut.
    """
    plain = (object, nn.Module, nn.Sequential)
    own = [each for each in type(module).__mro__ if each.__module__.startswith("torch.") and each not in plain]
    return [] if own else [part for child in module.children() for part in _called_parts(child)]


def split_units(whole: Partition, dtype_of: Callable[[torch.Tensor], torch.dtype]) -> Partition:
    """Splits units whose trainable parameters have several dtypes into one unit for each dtype.

    Frozen parameters stay with the first dtype. A module that needed such a unit then needs all of its new units.
    """
    units: list[UnitSpec] = []
    became: list[list[int]] = []
    for unit in whole.units:
        found = dict.fromkeys(dtype_of(each) for each in unit.parameters if each.requires_grad)
        dtypes: list[torch.dtype | None] = [*found] or [None]
        became.append(list(range(len(units), len(units) + len(dtypes))))
        for dtype in dtypes:
            own = [
                (each, names)
                for each, names in zip(unit.parameters, unit.names, strict=True)
                if (dtype_of(each) == dtype if each.requires_grad else dtype is dtypes[0])
            ]
            name = unit.name if dtype is dtypes[0] else f"{unit.name} in {dtype}"
            parameters, all_names = [each for each, _ in own], [names for _, names in own]
            units.append(dataclasses.replace(unit, name=name, parameters=parameters, names=all_names))
    hooks = [
        dataclasses.replace(hook, needs=tuple(new for old in hook.needs for new in became[old])) for hook in whole.hooks
    ]
    return Partition(units, hooks, whole.roots)


def _is_called(module: nn.Module) -> bool:
    """Returns True if the module has its own `forward`. See Note [Called modules]."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _called_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module itself if it is called, else the outermost called modules with parameters below it."""
    if not _has_parameters(module):
        return
    if _is_called(module):
        yield module
        return
    for child in module.children():
        yield from _called_parts(child)


def _outermost(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Returns the modules that lie inside no other of them."""
    chosen = set(modules)
    inner = {below for module in chosen for below in module.modules() if below is not module}
    return chosen - inner


def _auto_blocks(roots: Sequence[nn.Module]) -> set[nn.Module]:
    """Returns the children of each model's largest list, and of every other list with at least 5 % as many
    parameters."""
    blocks: set[nn.Module] = set()
    for root in roots:
        lists = [(_num_elements(module), module) for module in root.modules() if _is_list_of_blocks(module)]
        largest = max((num_elements for num_elements, _ in lists), default=0)
        for num_elements, module in lists:
            if num_elements * 20 >= largest:
                blocks.update(block for child in module.children() for block in _called_parts(child))
    return _outermost(blocks)


def _outermost_whole(roots: Sequence[nn.Module], blocks: set[nn.Module], split: Container[nn.Module]) -> set[nn.Module]:
    """Returns the blocks, with the parts of those that are split in their place, and those of other split modules."""
    whole = {module for module in blocks if module not in split}
    parts = [part for root in roots for module in root.modules() if module in split for part in parts_of(module)]
    return whole | {part for part in parts if part not in split}


def _is_list_of_blocks(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    children = [child for child in module.children() if _has_parameters(child)]
    half = _num_elements(module) / 2  # see Note [Lists in lists]
    return len(children) >= 2 and not any(_is_list_of_blocks(c) and _num_elements(c) > half for c in children)


def _chosen_blocks(roots: Sequence[nn.Module], units: Sequence[type[nn.Module] | str]) -> set[nn.Module]:
    blocks: set[nn.Module] = set()
    for choice in units:
        found = [part for root in roots for match in _matches(root, choice) for part in _called_parts(match)]
        if not found:
            wanted = repr(choice) if isinstance(choice, str) else choice.__qualname__
            known = sorted({type(module).__qualname__ for root in roots for module in root.modules()})
            raise usage_error(
                "units that name modules with parameters",
                f"none for {wanted}",
                f"give a class of the model ({', '.join(known)}) or a pattern of names in named_modules()",
            )
        blocks.update(found)
    return _outermost(blocks)


def _matches(root: nn.Module, choice: type[nn.Module] | str) -> Iterator[nn.Module]:
    for name, module in root.named_modules():
        if isinstance(choice, str):
            if module is not root and fnmatch.fnmatchcase(name, choice):
                yield module
        elif isinstance(module._modules.get("_orig_mod", module), choice):  # torch.compile's wrapper is called
            yield module


def _refuse_immovable(names: dict[torch.Tensor, list[str]], buffers: list[tuple[str, torch.Tensor]]) -> None:
    places: dict[torch.device, list[tuple[int, int, str]]] = {}
    for parameter, (name, *_) in names.items():
        _refuse_flaw(name, _flaw(parameter))
        if _has_memory(parameter):
            places.setdefault(parameter.device, []).append((*_span(parameter), name))
    for spans in places.values():
        spans.sort()
        for (_, end, name), (start, _, other) in itertools.pairwise(spans):
            if start < end:
                raise usage_error(
                    "parameters that share no memory",
                    f'"{name}" and "{other}", two Parameters over the same bytes',
                    "tie them by assigning the same Parameter to both names, or clone one",
                )
    for buffer_name, buffer in buffers:
        if not _has_memory(buffer):
            continue
        begin, end = _span(buffer)
        spans = places.get(buffer.device, [])
        number = bisect.bisect_left(spans, (end,)) - 1  # the last span that begins before the buffer ends
        if number >= 0 and spans[number][1] > begin:  # it would not follow: units move without buffers
            raise usage_error(
                "buffers and parameters that share no memory",
                f'"{buffer_name}", a buffer over bytes of the parameter "{spans[number][2]}"',
                "use the parameter itself in forward, or clone the buffer",
            )


def _refuse_flaw(name: str, flaw: tuple[str, str] | None) -> None:
    if flaw is not None:
        found, remedy = flaw
        raise usage_error("dense parameters in ordinary memory", f'"{name}" {found}', remedy)


def _has_memory(tensor: torch.Tensor) -> bool:
    if is_wrapper(tensor):
        return False
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.device.type != "meta"


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of the tensor's first byte and of the byte after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _flaw(parameter: torch.Tensor) -> tuple[str, str] | None:
    """Returns why a parameter cannot be moved, and the remedy. None if it can be moved."""
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return "not initialised yet", "run one forward pass on the CPU before wrapping"
    if type(parameter).__name__ in ("Params4bit", "Int8Params"):
        if flaw := flaw_of_quantised(parameter):
            return flaw
    elif type(parameter) not in (nn.Parameter, torch.Tensor):
        return f"of type {type(parameter).__qualname__}", "wrap before parameters are converted or sharded"
    if parameter.is_inference():
        return "made in torch.inference_mode, which gradients and updates cannot use", "make the model outside of it"
    if parameter.layout is not torch.strided:
        return f"with layout {parameter.layout}", "use a dense parameter"
    if parameter.is_quantized:
        return "quantised", "use a parameter of an ordinary dtype"
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        found = f"with shape {tuple(parameter.shape)} and strides {parameter.stride()}"
        return found, "assign a contiguous copy"
    return None


class _Builder:
    """Walks the roots in module order, and gives each parameter to the first group that names it."""

    def __init__(self, blocks: set[nn.Module]) -> None:
        self.blocks = blocks
        self.groups: list[UnitSpec] = []
        self.owner: dict[torch.Tensor, UnitSpec] = {}
        self.hooked: set[nn.Module] = set()
        self.direct: dict[nn.Module, list[torch.Tensor]] = {}  # the parameters that a holder uses itself
        self.seen: set[nn.Module] = set()

    def add_root(self, root: nn.Module, prefix: str) -> None:
        direct = self._new_group(f"{prefix or type(root).__name__} (direct)", None)
        self._walk(root, prefix, holder=root, direct=direct)

    def _new_group(self, name: str, module: nn.Module | None) -> UnitSpec:
        group = UnitSpec(name, [], [], module in self.blocks, module)
        self.groups.append(group)
        return group

    def _give(self, group: UnitSpec, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter not in self.owner:
                self.owner[parameter] = group
                group.parameters.append(parameter)

    def _walk(self, module: nn.Module, name: str, holder: nn.Module, direct: UnitSpec) -> None:
        """Groups the parameters of a subtree.

        `holder`: the nearest called module above. Its direct parameters are the unit `direct`.
        """
        is_called = _is_called(module)
        if module in self.seen:
            return
        if is_called:  # an uncalled module may occur below several holders, and has parameters for each
            self.seen.add(module)
        if module in self.blocks or (is_called and self.blocks.isdisjoint(module.modules())):
            if _has_parameters(module):
                self._give(self._new_group(name or type(module).__name__, module), tensors_in(module.parameters()))
                self.hooked.add(module)
                if module not in self.blocks:
                    self.hooked.update(_announcers(module, module))
            return
        if is_called and module is not holder:
            holder, direct = module, self._new_group(f"{name} (direct)", None)
        own = list(tensors_in(module.parameters(recurse=False)))
        if own:
            self._give(direct, own)
            self.direct.setdefault(holder, []).extend(own)
            self.hooked.add(holder)
        for child_name, child in module.named_children():
            self._walk(child, f"{name}.{child_name}" if name else child_name, holder, direct)

    def finish(self, roots: list[nn.Module], prefixes: list[str], names: dict[torch.Tensor, list[str]]) -> Partition:
        units = [group for group in self.groups if group.parameters]
        for unit in units:
            unit.names.extend(tuple(names[parameter]) for parameter in unit.parameters)
        index = {parameter: i for i, unit in enumerate(units) for parameter in unit.parameters}
        hooks: list[HookSpec] = []
        for root, prefix in zip(roots, prefixes, strict=True):
            for name, module in root.named_modules(prefix=prefix):
                if module in self.hooked:
                    self.hooked.discard(module)
                    needs = sorted({index[parameter] for parameter in self._used(module)})
                    title = name or type(root).__name__
                    hooks.append(HookSpec(title, module, tuple(needs), module in self.blocks))
        return Partition(units, hooks, roots)

    def _used(self, module: nn.Module) -> Iterator[torch.Tensor]:
        """Returns the parameters that a hooked module announces: all in its subtree.

        A module that holds blocks announces only its direct parameters, because the modules below announce their own.
        """
        return iter(self.direct[module]) if module in self.direct else tensors_in(module.parameters())


def _announcers(module: nn.Module, called: nn.Module) -> Iterator[nn.Module]:
    """Yields the called modules in a subtree that own parameters, directly or through uncalled modules."""
    called = module if _is_called(module) else called
    if next(module.parameters(recurse=False), None) is not None:
        yield called
    for child in module.children():
        yield from _announcers(child, called)
