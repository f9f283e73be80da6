"""A language model: split the sequence."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.position = nn.Parameter(torch.randn(1, 64, 32) * 0.02)
        self.blocks = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position[:, : tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


network = Model()
tokens = torch.randint(50, (2, 41))
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
numbers = []
for _ in range(3):
    optimizer.zero_grad()
    logits = network(tokens[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    numbers.append(loss.item())
print("NUMBERS", json.dumps(numbers))
