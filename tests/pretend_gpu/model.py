"""A small GPT, and a loop that trains it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LENGTH = 61, 32, 4, 16


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = self.qkv(self.before_attention(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.project(y.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.drop(self.contract(F.gelu(self.expand(self.before_mlp(x)))))


class GPT(nn.Module):
    def __init__(self, layers: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (4, LENGTH + 1), generator=generator) for _ in range(count)]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor], clip: float | None = 1.0
) -> torch.Tensor:
    """`data` lies where the model does. The losses: nothing in it waits for a device."""
    losses = []
    for batch in data:
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def trained(device: str, steps: int = 4, **options: object) -> dict[str, torch.Tensor]:
    """Losses and weights on the CPU. AdamW's own way of CUDA, so that twins do the same."""
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, **options)
    data = [each.to(device) for each in batches(steps)]
    losses = train(model, optimizer, data)
    return {"losses": losses.cpu()} | {name: value.cpu() for name, value in model.state_dict().items()}
