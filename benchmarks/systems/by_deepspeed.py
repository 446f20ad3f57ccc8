"""DeepSpeed's ZeRO-Offload family, in its best known settings; one rank.

Pinned memory, overlapped communication, contiguous gradients, prefetching; buckets of 64 MiB where memory is short
(`device_memory`), at their defaults else. bf16 keeps fp32 masters on the host.
"""

from __future__ import annotations

from typing import Any, ClassVar

import deepspeed

from benchmarks.systems.task import System, bytes_of, mean, on_device

BUCKET = 32 << 20  # elements
AIO = {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True}  # as noria's files


class Zero(System):
    stage = 2
    offloads_weights = False
    optimizer_options: ClassVar[dict[str, Any]] = {}
    zero_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, task):
        self.task = task
        offload = {"device": "cpu", "pin_memory": True}
        zero = {"stage": self.stage, "offload_optimizer": offload | self.optimizer_options, "overlap_comm": True}
        zero |= {"contiguous_gradients": True, **self.zero_options}
        if task.device_memory:
            zero["reduce_bucket_size"] = BUCKET
        if self.stage == 3:
            if self.offloads_weights:
                zero["offload_param"] = offload
            if task.device_memory:
                live = task.device_memory // 8  # elements of gathered weights: half of the memory in bf16 and fp32 both
                zero |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_max_live_parameters": live}
                zero["stage3_max_reuse_distance"] = live
        adamw = {**task.adamw, "betas": list(task.betas)}
        self.config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": task.micro_batches,
            "gradient_clipping": task.clip,
            "bf16": {"enabled": task.dtype == "bf16"},
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": adamw},
            "aio": AIO,
        }
        model = task.make_model()
        if task.dtype == "bf16":
            model = model.bfloat16()
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=self.config, dist_init_required=True
        )

    def step(self, batches):
        losses = []
        for inputs, targets in on_device(batches, self.task.device):
            loss = self.engine(inputs, targets)[1]
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss)
        return mean(losses)

    def settings(self):
        return self.config

    def device_bytes(self):
        """Weights that are not offloaded, or are gathered just now, and two buckets of gradients."""
        weights = bytes_of(each.data for each in self.engine.module.parameters())
        element = 2 if self.task.dtype == "bf16" else 4
        bucket = self.config["zero_optimization"].get("reduce_bucket_size", 500_000_000)
        elements = sum(getattr(each, "ds_numel", each.numel()) for each in self.engine.module.parameters())
        return weights + 2 * element * min(bucket, elements)


class Zero2(Zero):
    """ZeRO-Offload: gradients and optimizer on the host, weights on the device."""


class Zero3(Zero):
    """Optimizer on the host, weights partitioned (over one rank) on the device."""

    stage = 3


class Zero3Weights(Zero):
    """Optimizer and weights on the host."""

    stage = 3
    offloads_weights = True


class Zero3Nvme(Zero):
    """ZeRO-Infinity: optimizer state in files, weights on the host. What is read and written overlaps with updates, of
    groups of parameters: several, also of a small model. Three groups are read, updated and written at once, of four
    tensors each."""

    stage = 3
    offloads_weights = True

    def __init__(self, task):
        folder = task.files_folder
        self.optimizer_options = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
        self.optimizer_options["buffer_count"] = 3 * 4
        self.zero_options = {"sub_group_size": min(100_000_000, task.num_parameters() // 20)}
        super().__init__(task)


class SuperOffload(Zero):
    """Its optimizer, in a process of its own, runs while gradients come in; with clipping it waits for all of them."""

    stage = 3
    optimizer_options: ClassVar[dict[str, Any]] = {"super_offload": True, "ratio": 0.9, "cpuadam_cores_perc": 0.9}
    zero_options: ClassVar[dict[str, Any]] = {"reduce_bucket_size": 400_000_000}

    def __init__(self, task):
        # Sub-groups are what is updated while others come: several, also of a small model.
        self.zero_options = self.zero_options | {"sub_group_size": min(400_000_000, task.num_parameters() // 10)}
        super().__init__(task)


class ZenFlow(Zero):
    """Updates important gradients at once, and others late: stale by design. Stage 3, for in 0.19.8 its stage 2
    flattens weights transposed and views them as they were."""

    stage = 3
    is_exact = False
    zero_options: ClassVar[dict[str, Any]] = {
        "zenflow": {
            "topk_ratio": 0.1,
            "select_strategy": "auto",
            "select_interval": "auto",
            "update_interval": "auto",
            "overlap_step": True,
        }
    }
