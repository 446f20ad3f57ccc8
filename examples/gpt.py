"""A GPT in plain PyTorch: nothing here knows about noria."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    vocab_size: int = 4096
    context: int = 256  # the most tokens the model sees at once
    num_layers: int = 6
    num_heads: int = 6
    width: int = 384
    tied: bool = False  # one matrix for the embedding and the head


class Attention(nn.Module):
    """Every position looks at itself and at what came before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width per head]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then two layers per position; each reads a normalised copy and adds to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.contract(F.gelu(self.expand(self.norm_mlp(x))))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.apply(self._initialise)
        if config.tied:
            self.head.weight = self.tokens.weight

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):  # its terms add up in the stream: keep their sum at one term's size
            for last in (module.attention.out, module.contract):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * self.config.num_layers))

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens, targets: int64 [batch, length]. Gives logits [batch, length, vocab_size], mean loss."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt: torch.Tensor,
        num_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """prompt: int64 [batch, length]. Gives [batch, length + num_tokens]; temperature 0: the likeliest."""
        tokens = prompt
        for _ in range(num_tokens):
            logits = self(tokens[:, -self.config.context :])[0][:, -1].float()
            if temperature == 0:
                following = logits.argmax(dim=-1, keepdim=True)
            else:
                following = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens
