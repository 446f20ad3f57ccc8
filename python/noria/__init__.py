"""Trains PyTorch models that do not fit into device memory: one call, your own loop.

model, optimizer = noria.wrap(model, optimizer, device_memory="8GiB")

With `kernel="torch"` training gives the bits of plain PyTorch with its optimizer on the CPU. By default noria's own
kernels run AdamW, Adam, SGD, Lion, Adafactor and Muon; their rms error is at most torch's.
"""

from pathlib import Path as _Path

import torch as _torch

from noria._build_check import check_build as _check_build
from noria._version import __version__ as __version__

_check_build(_Path(__file__).parent, _torch.__version__)  # before anything loads _C

from noria import optim, testing
from noria._C import MachineError, UsageError
from noria.checkpoint.dcp_state import sharded_state
from noria.checkpoint.file import load, save
from noria.model.moment_formats import plain_state_dict
from noria.one_card import asleep, ema, weights
from noria.policy import Policy
from noria.pretrained import load_pretrained
from noria.report import report
from noria.wrap import is_wrapped, materialize, plan, unwrap, wrap

__all__ = [
    "MachineError",
    "Policy",
    "UsageError",
    "asleep",
    "ema",
    "is_wrapped",
    "load",
    "load_pretrained",
    "materialize",
    "optim",
    "plain_state_dict",
    "plan",
    "report",
    "save",
    "sharded_state",
    "testing",
    "unwrap",
    "weights",
    "wrap",
]
