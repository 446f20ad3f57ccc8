"""Defines and checks the options of a wrapped model, before noria does anything.

A field exists here only once it works.

Units: amounts of memory are bytes. As text they are a number and a unit ("8GiB", "1.5 GB").
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
import re
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import torch
from torch import nn

from noria._errors import UsageError, usage_error

__all__ = [
    "STATE_DTYPES",
    "Policy",
    "compute_device",
    "format_bytes",
    "make_policy",
    "parse_bytes",
    "plural",
    "refuse_lost_trace",
    "to_bytes",
]

STATE_DTYPES = ("fp32", "bf16", "8bit")
"""Formats of moments. The largest one comes first."""

_UNITS = {prefix.lower() + "ib": 1024**power for power, prefix in enumerate(["K", "M", "G", "T"], start=1)}
_UNITS |= {prefix.lower() + "b": 1000**power for power, prefix in enumerate(["", "K", "M", "G", "T"])}
_TOO_LARGE = 1 << 60  # bytes


def parse_bytes(text: str) -> int:
    """Returns bytes: "8GiB" is 8 * 1024**3, "8GB" is 8 * 1000**3. Drops fractions of a byte."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE | re.ASCII)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise usage_error('an amount of memory such as "8GiB" or "512MiB"', repr(text), "write a number and a unit")
    return int(Decimal(match[1]) * factor)


def format_bytes(num_bytes: int) -> str:
    """Returns text such as "812.0 MiB". Below 1 KiB it is the exact number of bytes."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    amount, units = num_bytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while round(abs(amount), 1) >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.1f} {units[0]}"


def plural(number: int, noun: str) -> str:
    """Returns the noun as it stands after the number: "visit" after 1, else "visits"."""
    return noun if number == 1 else noun + ("es" if noun.endswith(("ch", "ss")) else "s")


@dataclasses.dataclass(frozen=True)
class Policy:
    """Holds the options of one wrapped model. `wrap` and `plan` take one, or its fields by name.

    Raises:
        UsageError: if a value makes no sense.

    Example:
        >>> policy = noria.Policy(device_memory="8GiB", dtype=torch.bfloat16)
        >>> model, optimizer = noria.wrap(model, optimizer, policy)
    """

    device: str = "auto"
    """Where layers compute: "cuda", "cuda:N" or "cpu". "auto" is "cuda" if torch finds such a device, else "cpu"."""

    device_memory: str | int | float = "auto"
    """Budget on that device for the window and the gradient buffers, and on CUDA for activations too.

    "8GiB", bytes, or a fraction as a float up to 1. On CUDA the fraction is of the device's total memory. On "cpu" it
    is of the memory that would keep all units resident: every working copy, and the gradient buffers of the two
    largest units."""

    host_memory: str | int = "auto"
    """Budget for the home: "64GiB" or bytes.

    "auto" is the memory that the tightest limit on this process leaves free (MemAvailable, control groups, ulimit -v).
    noria leaves 1/16 of that unused, and at least 256 MiB. Several ranks on one machine get equal shares of the free
    memory."""

    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    """A folder on a fast disk, or several on several disks. What does not fit into `host_memory` lies there.

    It is state first: moments, and low bits of masters. A unit's state comes to host memory for each update and goes
    back, while the device computes. If that is not enough, frozen weights lie there, too, and come for each fetch.
    Several folders share every unit's part, so that their disks work at once. A folder must be your own, no link, and
    not writable for others; noria makes it if only its last part is missing. The files have no names there, and the
    system gives their space back when the process ends. Only noria's own kernels update state that lies in files, and
    only on the host."""

    file_memory: str | int = "auto"
    """A limit on the bytes in `files`: "200GiB" or bytes. "auto": no limit."""

    window: str | int = "auto"
    """The largest number of units that are leased at once, 2 or more. "auto": only `device_memory` limits it."""

    resident: str | int = "auto"
    """Which units stay on the device, and which stream.

    - "none": all units stream through the window, and updates run on the host.
    - "all": from the first forward after each optimizer's first step, weights, masters, moments and gradients lie on
      the device, and updates run there.
    - "24GiB", or bytes: some units stay, as under "all". They take at most this much device memory, with masters and
      moments. They are spread evenly over the model. The others stream.
    - "auto": noria chooses how many units stay. It simulates steps and takes the shortest one. The costs of the
      simulation are measured in the first steps, or by an earlier run. If units cannot stay, all stream. They do so too
      with a `window` of your own, and on "cpu" without a `device_memory`.

    noria refuses what does not fit into `device_memory`, or on CUDA into half of it. The home stays allocated, and what
    a read of it needs is copied there first. Units that torch's code updates stay with optimizer_device="device" alone.
    On CUDA the others need a noria that was built with nvcc, if they train."""

    units: str | Sequence[type[nn.Module] | str] = "auto"
    """Which modules move together: a list of module classes, or of name patterns as in `fnmatch` ("*.layers.*").

    If matches are nested, the outermost ones count. "auto": the repeated blocks, split between modules if the device
    has no room for one. The remaining parameters are grouped by module."""

    dtype: torch.dtype | None = None
    """None keeps the model's dtypes. torch.bfloat16 casts as `model.bfloat16()` does, and keeps fp32 masters."""

    kernel: str = "auto"
    """Which code runs the updates.

    "torch": the real torch optimizer on the home's tensors, bit for bit. "fused" and "auto": noria's own kernels if
    they cover the optimizer, else torch. They cover AdamW, Adam, SGD, noria.optim.Lion, Adafactor and Muon, on
    fp32 weights or fp32 masters. Muon's matrix products are torch's. `noria.plan` and `noria.report` say which code it
    is."""

    optimizer_device: str = "host"
    """Where updates of units that stream run.

    - "host": on the host, where masters and moments lie.
    - "device": on the device. Pieces of each unit go there and back: weights, gradients, masters and moments. This is
      for optimizers that are slow on the host, such as Muon, and for hosts with few cores. torch's own code then has
      the bits that it has on that device, so keep the value for the whole run. noria's kernels have the same bits on
      both. Not with update="backward", nor for optimizers that may look at all parameters."""

    state_dtype: str = "fp32"
    """How noria's own kernels store the moments.

    "fp32"; "bf16", half as large; "8bit", a quarter as large: codes with a scale for each 256 elements. "bf16" and
    "8bit" are rounded at random, without bias. Moments that torch updates stay fp32."""

    rounding_seed: int = 0
    """The seed of that rounding, so that each run gives the same bits.

    The step and the element's place in the optimizer enter the random numbers too."""

    activations: str = "keep"
    """What noria does with the activations that a block saves for its backward. All values give the same bits.

    - "keep": autograd keeps them on the device.
    - "offload": they move to the home, and come back ahead of the block's backward. Small tensors stay.
    - "recompute": only the block's inputs are kept, and its backward runs the forward again.
    - "auto": as many are kept as `activation_memory` has room for. The rest is offloaded, or recomputed if that is
      measured to be cheaper.

    Offloading takes host memory during the first forwards. The ledger shows it as "saved for backward", and
    `host_memory` limits it. Unless the value is "keep", a wrapped `PipelineStage` keeps no inputs and outputs of
    micro-batches in flight."""

    activation_memory: str | int = "auto"
    """With activations="auto": the most device memory for the activations that blocks save. "4GiB" or bytes.

    The limit holds if backwards come in the order of their forwards. On CUDA "auto" is a quarter of `device_memory`
    at first: the window has half of it, and the rest of the computation needs some too. When costs are known, the
    planner chooses it. On "cpu" there is no limit."""

    update: str = "auto"
    """When the host optimizer runs. All values give the same bits.

    - "blocking": inside `step()`.
    - "auto": earlier or later than `step()`.
    - "backward": each unit is updated in place as soon as its gradients are complete, and they are then dropped. This
      makes the smallest home, and there is no `p.grad`.

    With "backward" the caller promises that `step()` follows every backward. The hyperparameters must not change
    between the start of that backward and its `step()`. A backward that only accumulates goes inside
    `with optimizer.accumulate():`. For a wrapped `PipelineStage` noria knows which backward is the last: the caller
    calls `step()` after each step of its schedule."""

    draft_memory: str | int = "auto"
    """Host memory for drafts: updates that are made during backward, and the logs that can undo them.

    "8GiB", bytes, or 0 for none. "auto" takes what is left of `host_memory` if the device has its own memory. On "cpu"
    it takes nothing, because layers and updates share cores and memory."""

    max_grad_norm: float | None = None
    """`step()` clips the gradients of its optimizer to this norm.

    The result is that of `torch.nn.utils.clip_grad_norm_` before `step()`, up to the order of summation.
    `optimizer.grad_norm` is the norm that `step()` found. If noria's kernels update, `p.grad` itself stays unclipped.
    Each of several optimizers clips by the norm of its own parameters."""

    reduce_dtype: torch.dtype | None = None
    """The dtype in which ranks that share the model multiply their 16-bit gradients by 1 / N and sum them.

    None: the dtype of the gradients. torch.float32 takes extra device memory: 4 bytes per element of the largest
    unit's gradients."""

    find_unused_parameters: bool = False
    """Whether ranks that share the model may run different modules in a pass, as in DistributedDataParallel.

    Examples: LayerDrop, branches, an expert for each rank, an evaluation on rank 0 alone. False: all ranks run the same
    modules in the same order, or all raise UsageError. True takes a message between all ranks before each gather and
    each sum. In one process the value does not matter."""

    check: str = "auto"
    """How closely noria watches for uses of evicted units.

    "operators" checks every operator outside the blocks, in every pass. "auto" does so until noria knows the model's
    passes. "off" never does."""

    reads: str = "passes"
    """When parameters can be read without `noria.materialize`.

    "passes": inside of passes, while their layer computes. "home": also from `wrap` and each `step()` until the next
    forward, on their device, and writes are taken over. `step()` then waits for its updates, so they cannot run beside
    the next forward. Ranks that share the model cannot have it: no rank holds whole weights."""

    trace: str | os.PathLike[str] | None = None
    """The path of a file to which noria writes a Chrome/Perfetto trace of the real run."""

    def __post_init__(self) -> None:
        if isinstance(self.device, torch.device):
            object.__setattr__(self, "device", str(self.device))
        if isinstance(self.units, Sequence) and not isinstance(self.units, str):
            object.__setattr__(self, "units", tuple(self.units))
        _check_device(self.device)
        _check_memory("device_memory", self.device_memory, fraction_allowed=True)
        _check_memory("host_memory", self.host_memory, fraction_allowed=False)
        object.__setattr__(self, "files", _checked_files(self.files))
        _check_memory("file_memory", self.file_memory, fraction_allowed=False)
        self._check_file_choices()
        if self.draft_memory != 0 or isinstance(self.draft_memory, bool):
            _check_memory("draft_memory", self.draft_memory, fraction_allowed=False)
        _check_window(self.window)
        if self.resident not in ("none", "all", "auto"):
            _check_resident(self.resident)
        _check_units(self.units)
        _check_dtype(self.dtype)
        _check_choice("kernel", self.kernel, ["auto", "fused", "torch"])
        _check_choice("optimizer_device", self.optimizer_device, ["host", "device"])
        _check_choice("state_dtype", self.state_dtype, list(STATE_DTYPES))
        _check_state_kernel(self.state_dtype, self.kernel)
        _check_seed(self.rounding_seed)
        _check_choice("activations", self.activations, ["keep", "recompute", "offload", "auto"])
        _check_memory("activation_memory", self.activation_memory, fraction_allowed=False)
        if self.activation_memory != "auto" and self.activations != "auto":
            raise usage_error(
                'activation_memory with activations="auto"',
                f'it with activations="{self.activations}"',
                'say activations="auto", or leave activation_memory out',
            )
        _check_choice("update", self.update, ["auto", "backward", "blocking"])
        _check_norm(self.max_grad_norm)
        if self.update == "backward" and self.max_grad_norm is not None:
            raise usage_error(
                'max_grad_norm under update="auto" or "blocking"',
                'update="backward", which updates before the norm is known',
                "choose one of the two",
            )
        if self.reduce_dtype is not None and self.reduce_dtype is not torch.float32:
            raise usage_error(
                "reduce_dtype=None or torch.float32", f"reduce_dtype={self.reduce_dtype!r}", "choose one of these"
            )
        if not isinstance(self.find_unused_parameters, bool):
            found = f"find_unused_parameters={self.find_unused_parameters!r}"
            raise usage_error("find_unused_parameters=True or False", found, "choose one of the two")
        _check_choice("check", self.check, ["auto", "operators", "off"])
        _check_choice("reads", self.reads, ["passes", "home"])
        _check_trace(self.trace)

    @property
    def folders(self) -> tuple[str, ...]:
        """Returns the folders of `files`.

        Example:
            >>> noria.Policy(files="/nvme/run1").folders
            ('/nvme/run1',)
        """
        return _checked_files(self.files) or ()

    def _check_file_choices(self) -> None:
        """Raises UsageError if another option asks for what cannot be with files."""
        if not self.files:
            if self.file_memory != "auto":
                raise usage_error("file_memory with files=", "it without files=", "name a folder, or leave it out")
            return
        refused = {
            'resident="none" or "auto" with files=': (
                f'resident="{self.resident}"',
                self.resident in ("none", "auto"),
            ),
            'optimizer_device="host" with files=': ('optimizer_device="device"', self.optimizer_device == "host"),
            'kernel="auto" or "fused" with files=': (
                'kernel="torch", whose state noria keeps in host memory',
                self.kernel != "torch",
            ),
        }
        for expected, (found, is_fit) in refused.items():
            if not is_fit:
                raise usage_error(expected, found, "leave one of the two out")


def make_policy(policy: Policy | None, fields: Mapping[str, Any]) -> Policy:
    """Returns the Policy of a call such as `wrap(model, optimizer, policy, **fields)`. Raises UsageError if the call
    gives both, or a field that does not exist."""
    known = [field.name for field in dataclasses.fields(Policy)]
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            remedy = f"did you mean {close[0]!r}?" if close else "remove it"
            raise usage_error(f"policy fields out of {', '.join(known)}", f"{name}={fields[name]!r}", remedy)
    if policy is None:
        return Policy(**fields)
    if not isinstance(policy, Policy):
        raise usage_error("a noria.Policy", repr(policy), 'give fields by name, for example device_memory="8GiB"')
    if fields:
        raise usage_error(
            "a policy or fields of one, not both",
            f"a Policy and {', '.join(fields)}",
            "use dataclasses.replace(policy, ...) and give the result",
        )
    return policy


def compute_device(policy: Policy, is_elsewhere: bool = False) -> torch.device:
    """Returns the device that `policy.device` means on this machine.

    `is_elsewhere`: a CUDA device may be one of another machine, if this one has none. Raises UsageError if there is no
    such device.
    """
    if policy.device == "cpu" or (policy.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0 and is_elsewhere:
        return torch.device(policy.device if ":" in policy.device else "cuda:0")
    if num_devices == 0:
        raise usage_error(
            f"a CUDA device for device={policy.device!r}",
            "none that torch can use",
            'device="cpu" computes on the host',
        )
    index = int(policy.device[5:]) if policy.device.startswith("cuda:") else torch.cuda.current_device()
    if index >= num_devices:
        raise usage_error(f"device=cuda:0 to cuda:{num_devices - 1}", policy.device, "choose one of these")
    return torch.device("cuda", index)


def to_bytes(amount: str | int | float, whole: int = 0) -> int | None:
    """Returns an amount of memory in bytes, or None for "auto". A float is a fraction of `whole` bytes."""
    if isinstance(amount, float):
        return int(amount * whole)
    if isinstance(amount, str):
        return None if amount == "auto" else parse_bytes(amount)
    return amount


def _checked_files(files: Any) -> tuple[str, ...] | None:
    """Returns the folders. Raises UsageError if they are none, or the same one twice."""
    if files is None:
        return None
    given = [files] if isinstance(files, str | os.PathLike) else files
    if not isinstance(given, Sequence) or not given or not all(isinstance(each, str | os.PathLike) for each in given):
        raise usage_error(
            "files=None, a folder, or a list of folders", f"files={files!r}", "name a folder on a fast disk"
        )
    folders = tuple(os.path.abspath(os.fspath(each)) for each in given)
    if len(set(folders)) < len(folders):
        raise usage_error("different folders in files=", f"files={files!r}", "name each folder once")
    return folders


def _check_device(value: object) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9][0-9]*))?", value, re.ASCII):
        raise usage_error('device="auto", "cuda", "cuda:N" or "cpu"', f"device={value!r}", "choose one of these")


def _check_memory(name: str, value: object, *, fraction_allowed: bool) -> None:
    fraction = ", or a float fraction above 0 and up to 1" if fraction_allowed else ""
    expected, found = f'{name}="auto", text such as "8GiB", bytes as an int{fraction}', f"{name}={value!r}"
    if isinstance(value, str):
        try:
            positive = value == "auto" or parse_bytes(value) > 0
        except UsageError:
            raise usage_error(expected, found, "write a number and a unit") from None
        if positive:
            return
    elif isinstance(value, int) and not isinstance(value, bool):
        if value >= _TOO_LARGE:
            raise usage_error(expected, found, "give a number of bytes that some machine has")
        if value > 0:
            return
    elif isinstance(value, float):
        if fraction_allowed and 0 < value <= 1:
            return
        raise usage_error(expected, found, f'a float is not a number of GiB: write {name}="8GiB"')
    raise usage_error(expected, found, f'write {name}="8GiB", or leave it out')


def _check_resident(value: object) -> None:
    expected = 'resident="none", "all", "auto", text such as "8GiB", or bytes as an int'
    if isinstance(value, float):
        raise usage_error(expected, f"resident={value!r}", 'write resident="8GiB", or leave it out')
    try:
        _check_memory("resident", value, fraction_allowed=False)
    except UsageError:
        raise usage_error(expected, f"resident={value!r}", 'write resident="8GiB", or leave it out') from None


def _check_window(value: object) -> None:
    if isinstance(value, str) and value == "auto":
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise usage_error('window="auto" or an int of 2 or more', f"window={value!r}", "give the cap as an int")
    if value < 2:
        raise usage_error(
            "a window of 2 units or more",
            f"window={value}",
            "raise it: nothing can be fetched while the only leased unit computes, so no work would overlap",
        )
    if value >= 1 << 31:
        raise usage_error("a window of fewer than 2**31 units", f"window={value}", "leave it out for no cap")


def _check_units(value: object) -> None:
    if isinstance(value, str) and value == "auto":
        return
    expected, found = 'units="auto" or a list of module classes or name patterns', f"units={value!r}"
    if not isinstance(value, tuple):
        raise usage_error(expected, found, "put it in a list, for example units=[Block]")
    if not value:
        raise usage_error(expected, "an empty list", 'units="auto" finds the repeated blocks')
    for entry in value:
        is_module_class = isinstance(entry, type) and issubclass(entry, nn.Module)
        if not is_module_class and not (isinstance(entry, str) and entry):
            raise usage_error(expected, f"{entry!r} in the list", 'name a class or a pattern such as "*.layers.*"')


def _check_dtype(value: object) -> None:
    if value is None or value is torch.bfloat16:
        return
    remedy = "other dtypes are not supported: convert the model yourself and leave dtype out"
    raise usage_error("dtype=None or torch.bfloat16", f"dtype={value!r}", remedy)


def _check_state_kernel(state_dtype: str, kernel: str) -> None:
    if kernel == "torch" and state_dtype != "fp32":
        raise usage_error(
            'state_dtype="fp32" with kernel="torch", which is the real torch optimizer',
            f'state_dtype="{state_dtype}"',
            'leave kernel out, or say kernel="fused"',
        )


def _check_seed(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise usage_error("rounding_seed=0 or another int below 2**64", f"rounding_seed={value!r}", "give such an int")


def _check_norm(value: float | None) -> None:
    if value is None:
        return
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and value > 0 and (value == math.inf or value <= sys.float_info.max):
        return
    raise usage_error("max_grad_norm=None or a number above 0", f"max_grad_norm={value!r}", "give the largest norm")


def _check_trace(value: object) -> None:
    names_a_file = isinstance(value, str | os.PathLike) and bool(os.fspath(value))
    if value is not None and not names_a_file:
        raise usage_error("trace=None or a path", f"trace={value!r}", 'name a file, such as "trace.json"')


def refuse_lost_trace(policy: Policy) -> None:
    """Raises UsageError if the trace file cannot be written.

    noria writes it after training, when the error would come too late.
    """
    if policy.trace is None:
        return
    path = os.path.abspath(os.fspath(policy.trace))
    remedy = 'make the folder first, and name a file in it, such as "trace.json"'
    if os.path.isdir(path):
        raise usage_error("trace= with the path of a file", f"the folder {policy.trace!r}", remedy)
    if not os.path.isdir(os.path.dirname(path)):
        raise usage_error("trace= in a folder that is there", f"trace={policy.trace!r}", remedy)


def _check_choice(name: str, value: object, allowed: list[str]) -> None:
    if isinstance(value, str) and value in allowed:
        return
    expected = f"{name}=" + " or ".join(f'"{choice}"' for choice in allowed)
    raise usage_error(expected, f"{name}={value!r}", "choose one of these")
