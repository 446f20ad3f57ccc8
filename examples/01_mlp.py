"""An MLP, trained through a window of three of its layers."""

import noria
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)]
model = nn.Sequential(nn.Linear(2, 128), *layers, nn.Linear(128, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = noria.wrap(model, optimizer, window=3)  # the one call

for step in range(200):
    points = torch.rand(256, 2, device=device)
    wanted = torch.sin(6 * points[:, :1]) * torch.cos(6 * points[:, 1:])
    loss = nn.functional.mse_loss(model(points), wanted)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19:
        print(f"step {step + 1:>3}  loss {loss.item():.4f}")

print(noria.report(model))
