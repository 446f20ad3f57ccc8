"""Small models, a tokenizer and data sets, all made here: nothing is downloaded."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
VOCAB = 64
BLOCKS = 4


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {**SPECIAL, **{word: number + len(SPECIAL) for number, word in enumerate(WORDS)}}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def llama(tied: bool = False, dtype: torch.dtype = torch.float32, **more: Any) -> LlamaForCausalLM:
    """Four blocks of width 32; always the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            **{
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": BLOCKS,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "pad_token_id": 0,
                "eos_token_id": 1,
                "bos_token_id": 1,
                "tie_word_embeddings": tied,
                **more,
            }
        )
        return LlamaForCausalLM(config).to(dtype)


def adamw(model: torch.nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


def texts(rows: int = 16) -> Dataset:
    draw = random.Random(1)
    return Dataset.from_list([{"text": words(draw, 12)} for _ in range(rows)])


def pairs(rows: int = 16) -> Dataset:
    draw = random.Random(2)
    return Dataset.from_list(
        [{"prompt": words(draw, 4), "chosen": words(draw, 5), "rejected": words(draw, 6)} for _ in range(rows)]
    )


def prompts(rows: int = 8) -> Dataset:
    draw = random.Random(3)
    return Dataset.from_list([{"prompt": words(draw, 4)} for _ in range(rows)])


def token_rows(rows: int = 16, length: int = 12) -> list[dict[str, list[int]]]:
    """For transformers' Trainer: rows of tokens that are their own labels."""
    draw = random.Random(4)
    made = []
    for _ in range(rows):
        row = [draw.randrange(3, VOCAB) for _ in range(length)]
        made.append({"input_ids": row, "attention_mask": [1] * length, "labels": list(row)})
    return made


def batch(number: int, rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """For loops of one's own."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, VOCAB, (rows, length), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
