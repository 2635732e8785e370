"""A small GPT over bytes: token ids in, loss out. Nothing here knows about checkpoints.

It has what makes a resume hard to fake: dropout (needs the RNG), and an output layer tied to the embedding (two names
in the state dict, one storage).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_hooks.demo.recipe import Recipe

VOCABULARY = 256
"""One token for each byte value."""


class Attention(nn.Module):
    """Causal self-attention: (batch, time, width) -> (batch, time, width)."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.heads = recipe.heads
        self.dropout = recipe.dropout
        self.project_in = nn.Linear(recipe.width, 3 * recipe.width)
        self.project_out = nn.Linear(recipe.width, recipe.width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, time, width = x.shape
        packed = self.project_in(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        output: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return output


class Block(nn.Module):
    """One transformer layer: attention, then a feed-forward of four times the width, each added to its input."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(recipe.width)
        self.attention = Attention(recipe)
        self.norm_feed_forward = nn.LayerNorm(recipe.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(recipe.width, 4 * recipe.width), nn.GELU(), nn.Linear(4 * recipe.width, recipe.width)
        )
        self.dropout = nn.Dropout(recipe.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same shape."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        output: Tensor = x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))
        return output


class GPT(nn.Module):
    """Next-byte model: two int64 (batch, time) tensors -> a 0-dim loss."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, recipe.width)
        self.positions = nn.Embedding(recipe.context, recipe.width)
        self.dropout = nn.Dropout(recipe.dropout)
        self.blocks = nn.ModuleList(Block(recipe) for _ in range(recipe.layers))
        self.norm = nn.LayerNorm(recipe.width)
        self.head = nn.Linear(recipe.width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of predicting each target from the inputs up to its place."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.tokens(inputs) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
