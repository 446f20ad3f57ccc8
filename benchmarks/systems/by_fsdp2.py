"""FSDP2 with CPUOffloadPolicy, torch's own: one rank; the optimizer runs on the host after backward."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.systems.task import PlainLoop, bytes_of


class Fsdp2(PlainLoop):
    def __init__(self, task):
        self.task = task
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        is_cuda = task.device == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
        mesh = init_device_mesh("cuda" if is_cuda else "cpu", (1,))
        options = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=is_cuda)}
        if task.dtype == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        self.model = task.make_model()
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        self.optimizer = task.make_adamw(self.model.parameters(), fused=True)

    def settings(self):
        return {"optimizer": "torch.optim.AdamW(fused=True)", "blocks": "one group each", "pin_memory": True}

    def device_bytes(self):
        """Two blocks as they are gathered, and the root's weights."""
        blocks = list(self.model.blocks)
        element = 2 if self.task.dtype == "bf16" else 4
        inside = {id(each) for block in blocks for each in block.parameters()}
        root = (each for each in self.model.parameters() if id(each) not in inside)
        one = bytes_of(each.to_local() for each in blocks[0].parameters()) if blocks else 0
        return (2 * one + bytes_of(each.to_local() for each in root)) * element // 4
