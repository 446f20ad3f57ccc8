"""ZeRO-Offload's engine, for host_bytes.py; run in DeepSpeed's own environment with a stage and a number of layers.

Settings as its documentation recommends them for offloading (pinned memory, overlapped communication, contiguous
gradients), bf16 with its fp32 master, CPU Adam; the model is handed over in bf16. Buckets of 64 MiB, not 1 GB, and in
stage 3 few gathered weights, as one sets them where memory is short.
"""

from __future__ import annotations

import contextlib
import sys

import _resident
import deepspeed
import torch

BUCKET = 32 << 20  # elements


def config_of(stage: int) -> dict:
    offload = {"device": "cpu", "pin_memory": True}
    zero = {"stage": stage, "offload_optimizer": offload, "overlap_comm": True, "contiguous_gradients": True}
    zero["reduce_bucket_size"] = BUCKET
    if stage == 3:
        zero |= {
            "offload_param": offload,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": 1e8,
            "stage3_max_reuse_distance": 1e8,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def device_bytes(engine: deepspeed.DeepSpeedEngine) -> dict[str, int]:
    """Weights that are not offloaded, or are gathered just now, and in a step the two buckets of gradients: what would
    lie on a device."""
    weights = sum(p.data.numel() * p.data.element_size() for p in engine.module.parameters())
    return {"built": weights, "steady": weights, "in_steps": weights + 2 * 2 * BUCKET}


def main() -> None:
    stage, num_layers = (int(word) for word in sys.argv[1:3])
    resident = _resident.Resident()
    with contextlib.redirect_stdout(sys.stderr):
        model = _resident.model_of(num_layers).bfloat16()
        num_elements = sum(p.numel() for p in model.parameters())
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config_of(stage), dist_init_required=True
        )
        tokens = _resident.batch()

        def step() -> torch.Tensor:
            loss = engine(tokens, tokens)[1]
            engine.backward(loss)
            engine.step()
            return loss

    _resident.measure(resident, step, num_elements, lambda: device_bytes(engine))


if __name__ == "__main__":
    main()
