"""transformers' Trainer on a CUDA device: noria's, against its own over a model that lies there, updated on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits
from torch import nn

from tests.pretend_gpu import vehicle

pytestmark = pytest.mark.gpu
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCAB, STEPS = 64, 4


class OnTheHost(torch.optim.AdamW):
    """Updates copies on the CPU, from copies of the gradients, as noria does."""

    masters: list[nn.Parameter] | None = None

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        if self.masters is None:
            self.masters = [nn.Parameter(each.detach().cpu()) for each in group["params"]]
            self.inner = torch.optim.AdamW(self.masters, weight_decay=0.0)
        self.inner.param_groups[0]["lr"] = group["lr"]
        for master, parameter in zip(self.masters, group["params"], strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.cpu()
        self.inner.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, group["params"], strict=True):
                parameter.copy_(master)


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    tokens = [torch.randint(1, VOCAB, (16,), generator=draw) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in tokens]


def trained(folder: Path, policy: dict[str, Any] | None, **options: Any) -> dict[str, torch.Tensor]:
    arguments = {"output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    arguments |= {"optim": "adamw_torch", "logging_steps": 1, "report_to": [], "save_strategy": "no", "seed": 0}
    args = transformers.TrainingArguments(**arguments | options)
    assert args.n_gpu  # is found now, and not later
    args._n_gpu = 1  # no DataParallel
    model, data = llama(), rows(2 * STEPS * args.gradient_accumulation_steps)
    if policy is None:
        made = transformers.Trainer(model, args, train_dataset=data)
        made.optimizer = OnTheHost(model.parameters(), lr=args.learning_rate)
    else:
        from noria.integrations.transformers import NoriaTrainer

        made = NoriaTrainer(model, args, train_dataset=data, noria=policy)
    made.train()
    if policy is not None:
        report = noria.report(made.model)
        assert report.ledger_agrees and report.num_fetches > 0, str(report)
    left = {name: value.cpu().clone() for name, value in made.model.state_dict().items()}
    logged = [row for row in made.state.log_history if "loss" in row]
    for number, row in enumerate(logged):
        left |= {f"{key} {number}": torch.tensor(float(row[key])) for key in ("loss", "grad_norm")}
    return left


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_it_has_the_bits_of_a_model_on_the_device(tmp_path, options):
    ours = trained(tmp_path, {"window": 2, "kernel": "torch"}, **options)
    assert_same_bits(ours, trained(tmp_path, None, **options))
    assert not torch.equal(ours["lm_head.weight"], llama().lm_head.weight)


@pytest.mark.skipif(vehicle.is_installed(), reason="there are no compilers for the pretend GPU")
def test_a_model_that_is_compiled_whole_has_the_same_bits_in_any_window(tmp_path):
    """noria cuts its graph at units, so its kernels are not those of a model that is compiled without noria."""
    options = {"bf16": True, "torch_compile": True}
    ours, others = (trained(tmp_path, {"window": window, "kernel": "torch"}, **options) for window in (2, 5))
    assert_same_bits(ours, others)
