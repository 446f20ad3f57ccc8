"""Shows state that lies in files: a unit's state has memory while it is shown, and only then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from noria import _C
from noria._errors import UsageError, usage_error
from noria.host.home import Home
from noria.host.limits import Limit, host_limits, margin_of, tightest
from noria.model.file_layout import STATE_SLOTS
from noria.policy import format_bytes
from noria.runtime.ledger import Ledger

__all__ = ["FileState"]


class FileState:
    """Knows the tensors that view state in files, and refuses access to them while that state has no memory.

    Order: `show` or `touch` before the state of a unit is read or written outside of updates; `release` before updates.
    """

    def __init__(self, home: Home, engine: _C.TorchBridge, ledger: Ledger) -> None:
        self._home = home
        self._ledger = ledger
        self._engine = engine
        # By unit; each with its address. Kept, because the user may have others over the same storage.
        self._tensors: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._unit_of: dict[int, int] = {}  # by storage of these tensors
        self._shown: set[int] = set()
        self._touched: int | None = None
        self._one_at_a_time = threading.Lock()
        self._blank = set(home.file_plan.sizes)

    def has(self, unit: int) -> bool:
        return self._home.record(unit) >= 0

    def is_blank(self, unit: int) -> bool:
        """Returns True if the unit's moments are zero, because nothing has written them."""
        return unit in self._blank

    def track(self, unit: int, tensor: torch.Tensor) -> torch.Tensor:
        """Adds a tensor that views the state of a unit. An access raises until `show` or `touch`."""
        self._tensors.setdefault(unit, []).append((tensor, tensor.data_ptr()))
        self._unit_of[_C.storage_of(tensor)] = unit
        if unit not in self._shown and unit != self._touched:
            _C.refuse_access(tensor, _REFUSAL)
        return tensor

    def unit_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the unit whose state in files the tensor views. None: it views no such state."""
        return self._unit_of.get(_C.storage_of(tensor))

    def touch(self, unit: int, *, writes: bool = True) -> None:
        """Gives the unit's state memory until another unit is touched. What is written there counts.

        Without `writes` the caller only reads, and nothing is written back to the file.
        """
        if not self.has(unit):
            return
        self._engine.home.access_home(unit, False)
        self._engine.home.access_state(unit, writes=writes, holds=False)
        if self._touched != unit:
            self.end_touch()
            self._touched = unit
            self._allow(unit)

    @contextlib.contextmanager
    def reading(self, unit: int) -> Iterator[None]:
        """Gives the unit's state memory while the block reads it. State that lies in no file has memory anyway."""
        if not self.has(unit):
            yield
            return
        is_touched = unit == self._touched
        self.touch(unit, writes=False)
        try:
            yield
        finally:
            if not is_touched:
                self.end_touch()

    def copied(self, unit: int, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns what `read` returns of the unit's state: a copy, if the state lies in a file. Threads: any."""
        if not self.has(unit):
            return read()
        with self._one_at_a_time, self.reading(unit):
            if torn := self._engine.torn():  # a write has failed, and a touch may give zeros
                raise usage_error(
                    "state in files of one step",
                    f"weights and optimizer state of different steps: {torn}",
                    "load a checkpoint of both: model.load_state_dict and optimizer.load_state_dict",
                )
            return read().clone()

    def show(self, units: list[int]) -> None:
        """Gives the state of these units memory until `release`, for the user.

        If memory is short, ends what was shown before. Raises UsageError if that is not enough.
        """
        wanted = [unit for unit in units if self.has(unit)]
        new = [unit for unit in wanted if unit not in self._shown]
        if self._shown and new and self._refusal_of(len(self._shown) + len(new)) is not None:
            self.release()
            new = wanted
        if new and (refusal := self._refusal_of(len(self._shown) + len(new))) is not None:
            raise refusal
        if new:
            self.end_touch()  # its slot may be the only one that is free
        for unit in new:
            self._engine.home.access_home(unit, False)
            self._engine.home.access_state(unit, writes=True, holds=True)
            self._blank.discard(unit)
            self._shown.add(unit)
            self._allow(unit)
        self._expect_slots()

    def bytes_to_show(self, num_units: int) -> int:
        """Returns the bytes of memory that slots take, beside those that are there, if so many units are shown."""
        files = self._home.files
        return max(0, num_units - files.num_slots) * self._home.file_plan.slot_bytes if files else 0

    def refuse_copies(self, num_bytes: int, together: int) -> None:
        """Raises UsageError if host memory has no room for copies of all that lies in files.

        Args:
            num_bytes: what this process takes for them.
            together: what all ranks on this machine take at once.
        """
        refusal = _refusal_of_memory(
            num_bytes,
            "have copies of all that lies in files",
            "free memory, or let torch.distributed.checkpoint.save write noria.sharded_state(model, optimizer), which "
            "reads one unit after the other",
            together,
        )
        if refusal is not None:
            raise refusal

    def release(self) -> None:
        """Ends all that was shown and touched. What the user has written there counts."""
        self.end_touch()
        if not self._shown:
            return
        for unit in self._shown:
            self._refuse(unit)
        self._shown.clear()
        self._engine.home.release_states()
        self._expect_slots()

    def note_written(self, unit: int) -> None:
        """The unit's moments are written now."""
        self._blank.discard(unit)

    def note_loaded(self) -> None:
        """All state has been loaded, so the moments of no unit are known to be zero."""
        self._blank.clear()

    def _expect_slots(self) -> None:
        if (files := self._home.files) is not None:
            self._ledger.expect("host", STATE_SLOTS, files.num_slots * files.slot_bytes)

    def end_touch(self) -> None:
        """Ends the last touch."""
        if self._touched is not None and self._touched not in self._shown:
            self._refuse(self._touched)
        self._touched = None

    def _allow(self, unit: int) -> None:
        for tensor, address in self._tensors.get(unit, ()):
            _C.move_tensor(tensor, address)
            _C.allow_access(tensor)

    def _refuse(self, unit: int) -> None:
        for tensor, _ in self._tensors.get(unit, ()):
            _C.refuse_access(tensor, _REFUSAL)

    def _refusal_of(self, num_units: int) -> UsageError | None:
        """Returns the error that says why so many units cannot be shown at once, or None if they can."""
        return _refusal_of_memory(
            self.bytes_to_show(num_units),
            f"show the moments of {num_units} units that lie in files at once",
            "look at optimizer.state[parameter] for one parameter after the other",
        )


def _refusal_of_memory(num_bytes: int, purpose: str, remedy: str, together: int = 0) -> UsageError | None:
    """Returns the error that says how much memory the host lacks, or None if it has enough.

    `together`: what all ranks on this machine take at once, under the limits that they share.
    """

    def needed(limit: Limit) -> int:
        return num_bytes if limit.is_own else max(num_bytes, together)

    least = tightest([each for each in host_limits() if 0 < needed(each) > each.free - margin_of(each.free)])
    if least is None:
        return None
    others = ", by all ranks on this machine" if needed(least) > num_bytes else ""
    size = format_bytes(needed(least))
    return usage_error(f"free host memory of at least {size}{others}, to {purpose}", str(least), remedy)


_REFUSAL = (
    "this state lies in a file now. Remedy: take it from optimizer.state[parameter] again; what you take is there "
    "until the next step()"
)
