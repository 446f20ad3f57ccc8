"""DeepSpeed's CPU Adam as ZeRO-Offload calls it, in an environment of its own; run by benchmarks/adamw.py.

Prints JSON: seconds of each round, for the step alone and for what ZeRO-Offload does around it: gradients scaled in
place, Adam on fp32 masters, and a copy to the bf16 working copy.
"""

import json
import sys
import time

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def main() -> None:
    count, rounds, threads = (int(word) for word in sys.argv[1:4])
    torch.set_num_threads(threads)
    master = torch.nn.Parameter(torch.full((count,), 1e-3))
    master.grad = torch.full((count,), 1e-3)
    working = torch.zeros(count, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([master], lr=1e-3, weight_decay=1e-2, adamw_mode=True)

    def offloaded() -> None:
        master.grad.mul_(0.999)
        optimizer.step()
        working.copy_(master.detach())

    samples: dict[str, list[float]] = {"step": [], "offloaded": []}
    for number in range(rounds + 2):
        for name, work in (("step", optimizer.step), ("offloaded", offloaded)):
            start = time.perf_counter()
            work()
            if number >= 2:
                samples[name].append(time.perf_counter() - start)
    print(json.dumps(samples))


if __name__ == "__main__":
    main()
