"""Nothing reaches for a network, and all run on the CPU, with one thread: the models are small."""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "ACCELERATE_USE_CPU": "true",
    "NORIA_CACHE": "",
}

import pytest
import torch
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def one_thread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    yield
    if torch.distributed.is_initialized():  # Lightning leaves a group, and accelerate believes in it
        torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
