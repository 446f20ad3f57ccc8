"""The models that journeys train: tiny, but with every habit of the real ones (tied heads, shared biases, routers).

An entry of ZOO builds the same model from the same seed, draws the same batch from the same number, and says how a loss
comes out of it. Nothing here knows about noria.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from tests.device import DEVICE

VOCAB, WIDTH, BATCH, LENGTH = 61, 32, 2, 9


@dataclasses.dataclass(frozen=True)
class Species:
    """`make(dropout)` builds the model; `loss(model, batch)` runs it; `generate(model, batch)` gives tensors of an
    eval pass; `adapted`: the names of the linear layers that LoRA adapts."""

    make: Callable[[float], nn.Module]
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    generate: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    adapted: tuple[str, ...]
    batch: Callable[[torch.Generator], dict[str, torch.Tensor]]


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)


def _causal_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = _tokens(generator)
    masked = torch.rand(tokens.shape, generator=generator) < 0.3
    masked[:, 0] = True  # a loss over nothing would be NaN
    return {
        "input_ids": torch.where(masked, torch.full_like(tokens, 1), tokens),
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.where(masked, tokens, torch.full_like(tokens, -100)),
    }


def _seq2seq_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)[:, :5].contiguous()}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def _generate(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    made: Any = model
    return made.generate(input_ids=batch["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)


def _logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).logits


class _DroppingGPT(GPT):
    """The example's GPT with dropout at the end of each block, which the example leaves out."""

    def __init__(self, config: GPTConfig, dropout: float) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.contract = nn.Sequential(block.contract, nn.Dropout(dropout))


def _gpt(tied: bool) -> Callable[[float], nn.Module]:
    def make(dropout: float) -> nn.Module:
        config = GPTConfig(VOCAB, context=16, num_layers=4, num_heads=2, width=WIDTH, tied=tied)
        return _DroppingGPT(config, dropout) if dropout else GPT(config)

    return make


def _gpt_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["input_ids"][:, :-1], batch["input_ids"][:, 1:])[1]


def _gpt_generate(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    made: Any = model
    return made.generate(batch["input_ids"], 3, temperature=0)


def _gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=WIDTH,
        n_layer=3,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def _llama_sizes(dropout: float, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "attention_dropout": dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    } | more


def _llama(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_llama_sizes(dropout), tie_word_embeddings=False))


def _qwen3(dropout: float) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_llama_sizes(dropout, head_dim=8), tie_word_embeddings=True))


def _moe(dropout: float) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_llama_sizes(dropout, head_dim=8, num_hidden_layers=2),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        router_aux_loss_coef=0.02,
        output_router_logits=True,
    )
    return Qwen3MoeForCausalLM(config)


def _bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForMaskedLM(config)


def _t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
        feed_forward_proj="gated-gelu",
    )
    return T5ForConditionalGeneration(config)


_ATTENTION = ("q_proj", "v_proj")
ZOO = {
    "gpt": Species(_gpt(False), _gpt_loss, _gpt_generate, ("query_key_value", "expand"), _causal_batch),
    "gpt_tied": Species(_gpt(True), _gpt_loss, _gpt_generate, ("query_key_value", "expand"), _causal_batch),
    "gpt2": Species(_gpt2, _loss, _generate, ("c_attn", "c_fc"), _causal_batch),
    "llama": Species(_llama, _loss, _generate, _ATTENTION, _causal_batch),
    "qwen3": Species(_qwen3, _loss, _generate, _ATTENTION, _causal_batch),
    "moe": Species(_moe, _loss, _generate, _ATTENTION, _causal_batch),
    "bert": Species(_bert, _loss, _logits, ("query", "value"), _masked_batch),
    "t5": Species(_t5, _loss, _generate, ("q", "v"), _seq2seq_batch),
}
"""By name. "gpt" is the repository's own example; the rest but "gpt_tied" are models of transformers."""


def build(name: str, *, seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same arguments give the same bits. The model is in training mode."""
    torch.manual_seed(seed)
    return ZOO[name].make(dropout).to(dtype).train()


def freeze_half(model: nn.Module) -> None:
    """Freezes every embedding and the whole first block, and every second matrix of the rest: units that are frozen
    wholly, partly and not at all."""
    for name, parameter in model.named_parameters():
        if "emb" in name or ".0." in name or "wte" in name or "tokens" in name:
            parameter.requires_grad_(False)
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() > 1]
    for parameter in rest[::2]:
        parameter.requires_grad_(False)


def adapt(model: nn.Module, species: str, seed: int = 1) -> nn.Module:
    """LoRA by peft over a model whose own weights are frozen. B is drawn, not zero, so that A learns at once."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=list(ZOO[species].adapted))
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return adapted


def batch_for(name: str, number: int) -> dict[str, torch.Tensor]:
    """Batch `number` of the stream: int64 [BATCH, LENGTH] and what else the model takes."""
    return ZOO[name].batch(torch.Generator(DEVICE).manual_seed(1000 + number))
