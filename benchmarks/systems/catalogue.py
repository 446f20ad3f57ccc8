"""All systems by name, the file and class of each, and the environment that it runs in (pins.toml)."""

from __future__ import annotations

import argparse
import dataclasses

OWN = "own"
"""The environment that runs the benchmark: it has noria."""


@dataclasses.dataclass(frozen=True)
class Entry:
    module: str
    cls: str
    environment: str = OWN
    what: str = ""


PLAIN = "plain PyTorch"

SYSTEMS = {
    PLAIN: Entry("plain", "Plain", what="all of it on the device"),
    "noria": Entry("by_noria", "Noria", what="update=auto, torch's clip"),
    "noria max_grad_norm": Entry("by_noria", "NoriaMaxNorm", what="update=auto, built-in clip, drafts"),
    "noria activations=auto": Entry(
        "by_noria", "NoriaAuto", what="as noria max_grad_norm; activations go or are redone"
    ),
    "noria draft_memory=0": Entry("by_noria", "NoriaLean", what="update=auto, built-in clip, no drafts"),
    "noria backward": Entry("by_noria", "NoriaBackward", what="update=backward; cannot clip"),
    "noria backward 8bit": Entry("by_noria", "NoriaBackward8Bit", what="as noria backward; moments of 8 bits"),
    "noria files": Entry("by_noria", "NoriaFiles", what="as noria backward; optimizer state in files"),
    "ZeRO-2 Offload": Entry("by_deepspeed", "Zero2", "deepspeed", "optimizer on the host"),
    "ZeRO-3 Offload": Entry("by_deepspeed", "Zero3", "deepspeed", "optimizer on the host"),
    "ZeRO-3 Offload weights": Entry("by_deepspeed", "Zero3Weights", "deepspeed", "optimizer and weights on the host"),
    "ZeRO-3 NVMe": Entry("by_deepspeed", "Zero3Nvme", "deepspeed", "as that; optimizer state in files"),
    "SuperOffload": Entry("by_deepspeed", "SuperOffload", "deepspeed", "ZeRO-3, updates in backward, unclipped"),
    "ZenFlow": Entry("by_deepspeed", "ZenFlow", "deepspeed", "ZeRO-3, stale updates"),
    "FSDP2 CPUOffload": Entry("by_fsdp2", "Fsdp2", what="weights and optimizer on the host"),
    "torchao CPUOffload": Entry("by_torchao", "TorchAo", "torchao", "optimizer on the host, no clip"),
    "torchao CPUOffload autocast": Entry("by_torchao", "TorchAoAutocast", "torchao", "fp32 weights, bf16 compute"),
    "TrainStream": Entry("by_trainstream", "TrainStream", "trainstream", "its own clip"),
    "RoundPipe": Entry("by_roundpipe", "RoundPipeStale", "roundpipe", "weights of the step before"),
    "RoundPipe exact": Entry("by_roundpipe", "RoundPipeExact", "roundpipe", "is_async=False"),
    "accelerate cpu_offload": Entry("by_accelerate", "Accelerate", "accelerate", "made for inference"),
}


def add_systems(parser: argparse.ArgumentParser) -> None:
    words = "names, or beginnings of names, between commas"
    parser.add_argument("--systems", type=chosen, default="all", help=words)


def chosen(words: str) -> list[str]:
    """`all`, or names between commas; a word that is no name stands for all that begin with it."""
    if words == "all":
        return list(SYSTEMS)
    found: list[str] = []
    for word in (each.strip().lower() for each in words.split(",")):
        named = [name for name in SYSTEMS if name.lower() == word]
        named = named or [name for name in SYSTEMS if name.lower().startswith(word)]
        if not named:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(SYSTEMS)}; found {word!r}")
        found += [name for name in named if name not in found]
    return found
