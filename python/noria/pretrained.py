"""Wraps a model without values and streams its weights into the home, from files as `save_pretrained` writes them.

Order: names, shapes and dtypes are compared by the files' headers first. Then the model is wrapped, which takes the
home. Last, tensors are read one at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from noria._errors import usage_error
from noria._progress import Bar
from noria.checkpoint.weight_files import Entry, WeightFiles, first_few
from noria.dist.load_fingerprint import lines_of_model, refuse_others
from noria.dist.ranks import Ranks, raised_by_all
from noria.policy import Policy
from noria.wrap import wrap
from noria.wrapped import Wrapped, wrapped_by, wrapped_together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["load_pretrained"]

_OTHER = (
    "build the model that was saved; if it was saved under other names, load it by its from_pretrained and noria.wrap "
    "the result"
)

Optimizers = Optimizer | Sequence[Optimizer]


def load_pretrained(
    model: nn.Module | Callable[[], nn.Module],
    path: str | os.PathLike[str],
    /,
    optimizer: Optimizers | Callable[[Any], Optimizer] | None = None,
    policy: Policy | None = None,
    *,
    mesh: DeviceMesh | None = None,
    **policy_fields: Any,
) -> Any:
    """Wraps a model and streams its weights from files into the home. The whole model is never in memory beside it.

    It reads the files that `save_pretrained` of transformers and diffusers writes, and those of safetensors: one
    tensor at a time, with a progress bar. Host memory stays within the plan, 64 MiB of the mapped file, and one tensor.
    A `.bin` file is mapped as a whole.

    Give a function that makes the model, such as `lambda: LlamaForCausalLM(config)`. Then its parameters get no memory,
    and its buffers get their values. A model that was built under `torch.device("meta")` works too, if all of its
    buffers are in the files.

    Values are converted to the dtypes of the model, as by `load_state_dict`. A tied weight may be in the files under
    one of its names, or under several.

    If ranks share the model, all of them call this, with a path that all can read. Each reads what it has at home.

    Args:
        model: A function or class that makes the model, or a model that is not wrapped.
        path: A folder with `model.safetensors`, `pytorch_model.bin`, or shards and their index. Or one such file.
        optimizer: A function of the parameters that makes it, such as `functools.partial(torch.optim.AdamW, lr=1e-4)`.
            Or what `wrap` takes: an optimizer, a list, or None.
        policy: As for `wrap`.
        mesh: As for `wrap`.
        **policy_fields: Fields of `Policy` by name, such as device_memory="8GiB".

    Returns:
        What `wrap` returns: `(model, optimizer)`, or the model alone if there is no optimizer.

    Raises:
        UsageError: before the model is changed or memory is taken. Reasons are missing or unexpected names, other
            shapes, quantised files, or a buffer that is in no file and has no values. Also as `wrap` does. If a file
            cannot be read later, the model stays wrapped; it raises until all of it has been loaded.

    Example:
        >>> torch.save(nn.Linear(9, 3).state_dict(), "model.bin")
        >>> model, optimizer = noria.load_pretrained(lambda: nn.Linear(9, 3), "model.bin", torch.optim.AdamW)
    """
    ranks = Ranks.meet(mesh)
    met = [] if ranks is None else [ranks]
    try:
        with raised_by_all(met, "noria.load_pretrained"):
            made = _made(model)
            files = WeightFiles(path)
            names = _names_to_load(made, files)
            updaters = _optimizers(optimizer, made)
            lines = lines_of_model(made, _Lazily(files, names)) if met else []
        refuse_others(met, lines)
    finally:
        for each in met:
            each.close()
    given = wrap(made, updaters, policy, mesh=mesh, **policy_fields)
    wrapped = wrapped_together(made)
    with raised_by_all([] if wrapped.context.ranks is None else [wrapped.context.ranks], "noria.load_pretrained"):
        _load(made, wrapped, files, names)
    return given


def _made(model: object) -> nn.Module:
    """Returns the model. If `model` makes it, its parameters are on the meta device."""
    made = model
    if not isinstance(model, nn.Module) and callable(model):
        with _parameters_on_meta():
            made = model()
    if not isinstance(made, nn.Module):
        raise usage_error(
            "a torch.nn.Module, or a function that makes one",
            f"{'one that returns ' if made is not model else ''}{type(made).__qualname__}",
            "give the model first: noria.load_pretrained(lambda: Model(config), path)",
        )
    if wrapped_by(made) is not None:
        raise usage_error(
            "a model that is not wrapped", "one that is", "load it by model.load_state_dict, or noria.unwrap it first"
        )
    return made


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Puts parameters on the meta device as modules get them, on this thread. Buffers are made with their values."""
    thread = threading.get_ident()
    placed = WeakIdKeyDictionary()

    def place(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        if parameter not in placed:
            data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            other = nn.Parameter(data, requires_grad=parameter.requires_grad)
            other.__class__ = type(parameter)
            other.__dict__.update(parameter.__dict__)
            placed[parameter] = other
        found: nn.Parameter = placed[parameter]
        return found

    handle = register_module_parameter_registration_hook(place)  # type: ignore[arg-type]  # torch's own type lacks it
    try:
        yield
    finally:
        handle.remove()


def _optimizers(given: object, model: nn.Module) -> Any:
    if given is None or isinstance(given, Optimizer | list | tuple) or not callable(given):
        return given
    return given(model.parameters())


# ---- what does not fit, found by the headers ----


def _names_to_load(model: nn.Module, files: WeightFiles) -> dict[str, list[str]]:
    """Returns the names of the tensors to read: of a tied weight, one. Beside each stand all its names in the model.

    Raises UsageError if model and files do not fit.
    """
    _refuse_lost_buffers(model)
    own = _tensors_of(model)
    ignored = _ignored(model)
    entries = {name: each for name, each in files.entries.items() if name in own or not ignored(name)}
    if unexpected := [name for name in entries if name not in own]:
        raise usage_error(
            f"files of this {type(model).__name__} in {files.path}",
            f"{first_few(unexpected)}, which it does not have",
            _OTHER,
        )
    groups: dict[int, list[str]] = {}
    for name, tensor in own.items():
        groups.setdefault(id(tensor), []).append(name)
    if missing := [names[0] for names in groups.values() if all(name not in entries for name in names)]:
        raise usage_error(
            f"all weights of {type(model).__name__} in {files.path}",
            f"none for {first_few(missing)}",
            "call model.tie_weights(), if one of these is tied; else " + _OTHER
            if hasattr(model, "tie_weights")
            else _OTHER,
        )
    for name, entry in entries.items():
        _refuse_misfit(name, entry, own[name], files.path)
    chosen = {}
    for names in groups.values():
        first, *others = [name for name in names if name in entries]
        for name in others:
            if not torch.equal(files.read(first), files.read(name)):
                raise usage_error(
                    f'the same values for "{first}" and "{name}", which the model ties',
                    f"others in {files.path}",
                    "build the model untied (tie_word_embeddings=False in a config of transformers)",
                )
        chosen[first] = names
    return chosen


def _refuse_lost_buffers(model: nn.Module) -> None:
    """Refuses buffers on the meta device that no file has."""
    lost = []
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                lost.append(f"{path}.{name}" if path else name)
    if lost:
        raise usage_error(
            "values for buffers that are in no checkpoint",
            f"{first_few(lost)} on the meta device, persistent=False",
            "call noria.load_pretrained(lambda: Model(config), path), which makes them; or build the model inside "
            "`with accelerate.init_empty_weights():`",
        )


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and saved buffers by the names of `state_dict()`."""
    own: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                own[f"{path}.{name}" if path else name] = tensor
    shown = {name for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, torch.Tensor)}
    if renamed := sorted(shown ^ own.keys()):
        raise usage_error(
            "a model whose state_dict() has the names of its parameters and buffers",
            f"{first_few(renamed)} in one of them alone",
            "noria.wrap the model, and load it by model.load_state_dict",
        )
    return own


def _ignored(model: nn.Module) -> Callable[[str], bool]:
    """Returns a test for names that models of transformers ignore: old files have `inv_freq` of each layer."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers()):
        patterns.append(r"rotary_emb\.inv_freq")
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _refuse_misfit(name: str, entry: Entry, own: torch.Tensor, path: str) -> None:
    if entry.shape != tuple(own.shape):
        raise usage_error(
            f'"{name}" with shape {tuple(own.shape)}',
            f"shape {entry.shape} in {path}",
            "build the model that was saved: its config has the sizes",
        )
    are_floats = entry.dtype.is_floating_point and own.dtype.is_floating_point
    is_quantised = entry.dtype.itemsize == 1 and entry.dtype is not own.dtype
    if entry.dtype is not own.dtype and (not are_floats or is_quantised):
        raise usage_error(
            f'"{name}" in {own.dtype}',
            f"{entry.dtype} in {path}",
            "give weights that are not quantised, or a model of the same dtype",
        )


class _Lazily(Mapping[str, torch.Tensor]):
    """Shows the chosen tensors of files as a state dict that is read one entry at a time."""

    def __init__(self, files: WeightFiles, names: Collection[str]) -> None:
        self._files, self._names = files, names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# ---- reading ----


def _load(model: nn.Module, wrapped: Wrapped, files: WeightFiles, names: Mapping[str, Sequence[str]]) -> None:
    """Writes the tensors into the home and into buffers. Nothing here is collective: each rank writes its own part."""
    wrapped.run.recover()
    done, total = 0, sum(files.entries[name].bytes for name in names)
    with Bar("loading weights", total) as bar, torch.no_grad():
        for name, value in files.items(names):
            _write(model, wrapped, names[name], value)
            del value  # its pages
            done += files.entries[name].bytes
            bar.tell(done, 0)


def _write(model: nn.Module, wrapped: Wrapped, names: Sequence[str], value: torch.Tensor) -> None:
    """Writes a value to what has these names: one parameter, or buffers."""
    for name in names:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters.get(key)
        if parameter is not None:
            slot = wrapped.context.slot_of[parameter]
            wrapped.weights.begin_load([slot.unit], not slot.trainable)
            wrapped.context.engine.home.access_home(slot.unit, True, frozen=not slot.trainable)
            wrapped.weights.write(slot, value)
            wrapped.loads.note(slot.index)
            return
        buffer = module._buffers[key]
        assert buffer is not None
        buffer.copy_(value)
        wrapped.loads.note((module, key))
