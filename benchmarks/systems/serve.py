"""One system in a process of its own: it does what it is told, a line of JSON for each word, and sleeps in between.

    python -m benchmarks.systems.serve NAME

Words on its input: {"do": "import"}, {"do": "build", "task": {...}}, {"do": "steps", "tokens": 2048, "first": 7,
"count": 4}, {"do": "about"}. Answers on its output; {"error": ...} where something was raised. It ends with its input.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
import traceback
from typing import Any

from benchmarks.systems.catalogue import SYSTEMS


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    server = Server(sys.argv[1])
    for line in sys.stdin:
        word = json.loads(line)
        try:
            answer = getattr(server, f"do_{word.pop('do')}")(**word)
        except BaseException as error:
            traceback.print_exc()
            said = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {said[0]}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    answers.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries that wait for other processes at the end would wait for ever


class Server:
    def __init__(self, name: str) -> None:
        self.name = name
        self.system: Any = None

    def do_import(self) -> dict[str, Any]:
        """What it takes before anything is built is not the system's."""
        entry = SYSTEMS[self.name]
        module = importlib.import_module(f"benchmarks.systems.{entry.module}")
        self.cls = getattr(module, entry.cls)
        import torch

        if torch.cuda.is_available():  # some create the device's context when they are imported: so do all
            torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda"))
            torch.cuda.synchronize()
        return {"torch": torch.__version__, "cuda": torch.cuda.is_available()}

    def do_build(self, task: dict[str, Any], host_limit: int | None = None) -> dict[str, Any]:
        """`host_limit`: bytes of private memory that the process may have from now on."""
        import torch

        from benchmarks.systems.task import Task

        self.task = Task(**{**task, "betas": tuple(task["betas"])})
        torch.set_num_threads(self.task.threads)
        if self.cls.needs_cuda and not torch.cuda.is_available():
            raise RuntimeError(f"{self.name} needs a CUDA device")
        self._cap(0)
        if host_limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (host_limit, host_limit))
        start = time.perf_counter()
        self.system = self.cls(self.task)
        self._cap(self.system.own_device_bytes())
        return {
            "seconds": time.perf_counter() - start,
            "parameters": self.task.num_parameters(),
        }

    def _cap(self, taken: int) -> None:
        """What torch's allocator may have of the device, beside what the system has taken there by itself."""
        import torch

        if self.task.device == "cuda" and self.task.device_memory and self.cls.is_capped:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min((self.task.device_memory - taken) / total, 1.0))

    def do_steps(self, tokens: int, first: int, count: int) -> dict[str, Any]:
        """So many steps in a row, until all that they need of device and host is done: updates behind the next step
        are hidden where there is a next one."""
        batches = [self.task.batches(tokens, number) for number in range(first, first + count)]
        start = time.perf_counter()
        losses = [self.system.step(each) for each in batches]
        self.system.finish()
        if self.task.device == "cuda":
            import torch

            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / count
        return {"seconds": seconds, "losses": [float(loss) for loss in losses], "device_bytes": self._device_bytes()}

    def _device_bytes(self) -> int:
        """On a device: the most so far. Without one: what would lie on it now."""
        if self.task.device != "cuda":
            return int(self.system.device_bytes())
        import torch

        return int(torch.cuda.max_memory_reserved() + self.system.own_device_bytes())

    def do_about(self) -> dict[str, Any]:
        return {
            "settings": self.system.settings(),
            "clips": bool(self.task.clip) and self.system.clips,
            "accumulates": self.task.micro_batches > 1 and self.system.accumulates,
            "is_exact": self.system.is_exact,
            "activations": self.system.activations,
            "command": [sys.executable, *sys.argv],
            "moved_bytes": self.system.moved_bytes(),
        }


if __name__ == "__main__":
    sys.exit(main())
