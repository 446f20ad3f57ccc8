"""Shows a progress bar for slow work inside `wrap`: only on a terminal, and only after one second."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

__all__ = ["Bar"]


class Bar:
    """Shows how many bytes of `total` are done. Shows nothing if `console` is not a terminal."""

    def __init__(
        self,
        what: str,
        total: int,
        console: Console | None = None,
        after_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._console = console if console is not None else Console(stderr=True)
        self._after_s = after_s
        self._clock = clock
        self._began = clock()
        self._progress: Progress | None = None
        self._task: TaskID  # once there is a `_progress`

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def tell(self, before: int, now: int) -> None:
        """Sets the progress: `before` bytes of finished work, and `now` bytes of the work under way."""
        done = before + now
        # The file is asked too: with FORCE_COLOR, rich takes every console for a terminal.
        if not (self._console.is_terminal and self._console.file.isatty()):
            return
        if self._progress is None:
            if done >= self._total or self._clock() - self._began < self._after_s:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task(self._what, total=self._total)
            self._progress.start()
        self._progress.update(self._task, completed=done)
