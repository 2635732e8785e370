"""A small GPT over bytes, split over tensor-parallel ranks: token ids in, loss out. Nothing here knows of checkpoints.

It has what makes a resume hard to fake: dropout (needs the RNG, another one on each rank), and an output layer tied to
the embedding (two names in the state dict, one storage). Attention heads and feed-forward units are split over the
ranks; embedding, norms and output layer are the same on all of them.

Dropout is applied only inside what is split (attention weights, feed-forward units), where each rank draws for its own
part. What is the same on all ranks so stays the same, although their generators differ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_hooks.demo.parallel import ColumnParallelLinear, Mesh, RowParallelLinear
from trainer_hooks.demo.recipe import Recipe

VOCABULARY = 256
"""One token for each byte value."""


class Attention(nn.Module):
    """Causal self-attention with this rank's share of the heads: (batch, time, width) -> (batch, time, width)."""

    def __init__(self, recipe: Recipe, mesh: Mesh, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = recipe.heads // recipe.tp
        self.dropout = recipe.dropout
        # Rows in the order (head, query-key-value, unit): a share of the rows is a share of the heads.
        self.project_in = ColumnParallelLinear(recipe.width, 3 * recipe.width, mesh, generator)
        self.project_out = RowParallelLinear(recipe.width, recipe.width, mesh, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, time, _ = x.shape
        packed = self.project_in(x).view(batch, time, self.heads, 3, -1)
        query, key, value = packed.permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        output: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, time, -1))
        return output


class FeedForward(nn.Module):
    """Two layers with four times the width between them, of which this rank has its share."""

    def __init__(self, recipe: Recipe, mesh: Mesh, generator: torch.Generator) -> None:
        super().__init__()
        self.widen = ColumnParallelLinear(recipe.width, 4 * recipe.width, mesh, generator)
        self.dropout = nn.Dropout(recipe.dropout)
        self.narrow = RowParallelLinear(4 * recipe.width, recipe.width, mesh, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same shape."""
        output: Tensor = self.narrow(self.dropout(functional.gelu(self.widen(x))))
        return output


class Block(nn.Module):
    """One transformer layer: attention, then feed-forward, each added to its input."""

    def __init__(self, recipe: Recipe, mesh: Mesh, generator: torch.Generator) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(recipe.width)
        self.attention = Attention(recipe, mesh, generator)
        self.norm_feed_forward = nn.LayerNorm(recipe.width)
        self.feed_forward = FeedForward(recipe, mesh, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same shape."""
        x = x + self.attention(self.norm_attention(x))
        output: Tensor = x + self.feed_forward(self.norm_feed_forward(x))
        return output


class GPT(nn.Module):
    """Next-byte model: two int64 (batch, time) tensors -> a 0-dim loss, the same on all tensor-parallel ranks.

    The weights are drawn from a generator that is seeded alike on every rank: tp = 1 and tp = 2 give one model.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(recipe.seed)
        self.tokens = nn.Embedding(VOCABULARY, recipe.width)
        self.positions = nn.Embedding(recipe.context, recipe.width)
        self.blocks = nn.ModuleList(Block(recipe, mesh, generator) for _ in range(recipe.layers))
        self.norm = nn.LayerNorm(recipe.width)
        self.head = nn.Linear(recipe.width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02, generator=generator)
        nn.init.normal_(self.positions.weight, std=0.02, generator=generator)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of predicting each target from the inputs up to its place."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
