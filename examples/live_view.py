"""What the demo shows while it trains: progress, loss, and the units that are in the window right now."""

from __future__ import annotations

import time
from collections.abc import Sequence

import noria
import torch
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch import nn

REFRESH_S = 0.25


class PlainView:
    """A line now and then, for logs and pipes."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        print()

    def begin(self, title: str, num_steps: int, model: nn.Module | None = None, units: Sequence[str] = ()) -> None:
        """From now on steps of this kind come; `model`: it is wrapped, and these are its units."""
        self.title, self.num_steps, self.model, self.units = title, num_steps, model, units
        self.num_done = self.num_tokens = 0
        self.loss, self.same = float("nan"), ""
        self.began = time.perf_counter()

    def step(self, loss: float, num_tokens: int, same: str = "") -> None:
        self.loss, self.same = loss, same
        self.num_done += 1
        self.num_tokens += num_tokens
        if self.num_done % 10 == 0 or self.num_done == self.num_steps:
            self.show()

    def tokens_per_s(self) -> float:
        return self.num_tokens / (time.perf_counter() - self.began)

    def show(self) -> None:
        line = f"{self.title}: step {self.num_done:>3} of {self.num_steps}  loss {self.loss:.3f}"
        line += f"  {self.tokens_per_s():.0f} tokens/s"
        if self.model is not None:
            resident = noria.report(self.model, write_trace=False).resident
            line += f"  in the window: {', '.join(resident) or 'nothing that is current'}  {self.same}"
        print(line, flush=True)


class LiveView(PlainView):
    """Redrawn four times a second, by the training thread, in the middle of its passes."""

    def __enter__(self) -> LiveView:
        self.progress = Progress(
            TextColumn("{task.description:<14}"), BarColumn(40), MofNCompleteColumn(), TimeRemainingColumn()
        )
        self.live = Live(self.progress, auto_refresh=False)
        self.live.start()
        self.shown = 0.0
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
        self.live.stop()
        print()

    def begin(self, title: str, num_steps: int, model: nn.Module | None = None, units: Sequence[str] = ()) -> None:
        super().begin(title, num_steps, model, units)
        self.task = self.progress.add_task(title, total=num_steps)
        if model is not None:
            self.hooks = [model.get_submodule(name).register_forward_hook(self.unit_was_used) for name in units]

    def step(self, loss: float, num_tokens: int, same: str = "") -> None:
        super().step(loss, num_tokens, same)
        self.progress.update(self.task, completed=self.num_done)
        if self.model is None:
            self.show_now_and_then()

    def unit_was_used(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        self.show_now_and_then()
        if output.requires_grad:
            output.register_hook(self.show_now_and_then)

    def show_now_and_then(self, *_: object) -> None:
        if time.perf_counter() - self.shown > REFRESH_S:
            self.show()

    def show(self) -> None:
        self.shown = time.perf_counter()
        lines = Text(f"loss {self.loss:.3f}    {self.tokens_per_s():.0f} tokens/s\n")
        if self.model is not None:
            report = noria.report(self.model, write_trace=False)
            for unit in self.units:
                here = unit in report.resident
                lines.append("● " if here else "· ", style="bold cyan" if here else "dim")
            lines.append(f"  {len(report.resident)} of {len(self.units)} units in the window now:\n")
            lines.append(f"{', '.join(report.resident) or 'none that is current'}\n", style="cyan")
            for place in dict.fromkeys(row.place for row in report.ledger):
                rows = [row for row in report.ledger if row.place == place]
                taken, planned = sum(row.taken for row in rows), sum(row.planned for row in rows)
                parts = ", ".join(f"{row.purpose} {row.taken / 2**20:.1f}" for row in rows)
                lines.append(f"{place:<7} {taken / 2**20:6.1f} of {planned / 2**20:.1f} MiB: {parts}\n")
            lines.append(self.same, style="green" if "same" in self.same else "bold red")
        self.live.update(Group(self.progress, Panel(lines, title=self.title, width=100)), refresh=True)
