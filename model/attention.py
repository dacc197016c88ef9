"""Attention, masked and with several heads: section 3.2 of the paper.

Conventions: masks are boolean and True means "attend"; they broadcast against
``[batch, heads, query, key]``. A stack makes of its mask, once for all its self-attentions, numbers
to add to the scores, -inf where the mask forbids: zeros elsewhere (`mask_bias`), or its position
bias (`RelativePositionBias`).

Reference:
    Vaswani et al., "Attention Is All You Need", 2017 (https://arxiv.org/abs/1706.03762).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.layers import Dropout


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """``[length, length]``: position t attends to 0 .. t."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def padding_mask(lengths: Tensor, max_length: int) -> Tensor:
    """``[batch]`` lengths -> ``[batch, 1, 1, max_length]``: keys before a row's length are real."""
    keys = torch.arange(max_length, device=lengths.device)
    return (keys[None, :] < lengths[:, None])[:, None, None, :]


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add to attention scores, which is what kernels make of it each time."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(q kᵀ / √d_k), equation 1 of the paper without the values.

    Args:
        query: ``[..., query, head_dim]``.
        key: ``[..., key, head_dim]``.
        mask: boolean, broadcastable to ``[..., query, key]``; True attends. Or numbers to add to
            the scores.
        scale: in place of 1 / √d_k.

    Returns:
        ``[..., query, key]``, float32; each row sums to 1, or is zero where the mask allows no key.
    """
    scores = (query @ key.transpose(-2, -1)).float()
    scores = scores / math.sqrt(query.shape[-1]) if scale is None else scores * scale
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.is_floating_point():
        scores, mask = scores + mask, mask > -torch.inf
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0)  # a row without any key is NaN after the softmax


FEW_QUERIES = 8
"""Up to so many a row, the library's fused attention gains nothing on cached keys: in float32 on a
CPU it takes up to three times as long as two products and a softmax."""

Pieces = Sequence[tuple[slice, int]]
"""Keys in parts, one behind the other, and for each how many rows there are up to the last one that
has a key in it: others need not be read there. The first part has all rows."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: Dropout | None = None,
    scale: float | None = None,
    pieces: Pieces | None = None,
) -> Tensor:
    """softmax(q kᵀ / √d_k) v, equation 1 of the paper.

    Args:
        query: ``[batch, heads, query, head_dim]``.
        key, value: ``[batch, heads, key, head_dim]``.
        mask: boolean, broadcastable to ``[batch, heads, query, key]``; True attends. Or numbers to
            add to the scores, in the dtype of the query.
        dropout: applied to the weights while training (section 5.4 applies it to sub-layer
            outputs only; the tutorial and most code since also drop weights).
        scale: in place of 1 / √d_k.
        pieces: how keys are best read where queries are few. The mask must forbid what they leave
            out.

    Returns:
        ``[batch, heads, query, head_dim]``; zero where the mask allows no key.
    """
    if dropout is None or not dropout.active:
        few = query.shape[-2] <= (1 if pieces is None else FEW_QUERIES)
        if few and query.dtype == torch.float32 and query.device.type == "cpu":
            return attention_of_few(query, key, value, mask, scale, pieces)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    weights: Tensor = dropout(attention_weights(query, key, mask, scale))
    return weights.to(value.dtype) @ value


def attention_of_few(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    pieces: Pieces | None = None,
) -> Tensor:
    """`attention` of few queries, which a decoding step has, as two products and a softmax."""
    rows, heads, count, head_dim = query.shape
    length = key.shape[-2]
    factor = head_dim**-0.5 if scale is None else scale
    # [rows, heads, ...] -> [rows * heads, ...]
    queries, keys, values = (query * factor).flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    (first, _), *others = pieces or [(slice(0, length), rows)]
    scores = torch.bmm(queries, keys[:, first].transpose(1, 2))
    if others:
        whole = scores.new_empty(rows * heads, count, length)
        whole[:, :, first] = scores
        for part, live in others:
            n = live * heads
            whole[:n, :, part] = torch.bmm(queries[:n], keys[:n, part].transpose(1, 2))
            if live < rows:
                whole[n:, :, part] = -torch.inf
        scores = whole
    weights = _softmax(scores.view(rows, heads, count, length), mask).flatten(0, 1)
    found = torch.bmm(weights[:, :, first], values[:, first])
    for part, live in others:
        n = live * heads
        found[:n].baddbmm_(weights[:n, :, part], values[:n, part])
    return found.view(rows, heads, count, head_dim)


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Attention weights; zeros where there is no key."""
    if mask is None:
        return scores.softmax(dim=-1)
    scores = scores + mask if mask.is_floating_point() else scores.where(mask, -torch.inf)
    return torch._safe_softmax(scores, dim=-1)


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: ``heads`` attentions side by side, each on its own projection.

    Self-attention, masked self-attention and cross-attention are this one module: they differ
    only in where keys and values come from and in the mask.

    Args:
        dim: width of the model.
        heads: number of heads; must divide ``dim`` where no ``head_dim`` is given.
        bias: whether the four projections have biases.
        dropout: on the attention weights while training.
        head_dim: width of a head; default ``dim / heads``.
        scale: on the scores; default ``1 / sqrt(head_dim)``.

    Raises:
        ValueError: ``dim`` is not a multiple of ``heads``, and no ``head_dim`` is given.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        bias: bool = True,
        dropout: float = 0.0,
        head_dim: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or (head_dim is None and dim % heads):
            raise ValueError(f"dim must be a multiple of heads, got dim {dim} and heads {heads}")
        self.heads = heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.scale = scale
        inner = heads * self.head_dim
        self.query = nn.Linear(dim, inner, bias=bias)
        self.key = nn.Linear(dim, inner, bias=bias)
        self.value = nn.Linear(dim, inner, bias=bias)
        self.output = nn.Linear(inner, dim, bias=bias)
        self.dropout = Dropout(dropout)
        self.joined: nn.Module | None = None

    def join_projections(self) -> None:
        """Make one product of the three, for self-attention, where all are of the same ``x``."""
        parts = (self.query, self.key, self.value)
        weight = torch.cat([part.weight.detach() for part in parts])
        joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        joined.weight = nn.Parameter(weight, requires_grad=False)
        if self.query.bias is not None:
            bias = torch.cat([part.bias.detach() for part in parts])
            joined.bias = nn.Parameter(bias, requires_grad=False)
        self.joined = joined
        del self.query, self.key, self.value

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`queries` and `keys_values` of the same ``x``."""
        if self.joined is None:
            return self.queries(x), *self.keys_values(x)
        joined = self.joined(x).view(*x.shape[:2], 3, self.heads, self.head_dim)
        # [batch, length, 3, heads, head_dim] -> three of [batch, heads, length, head_dim]
        queries, keys, values = joined.permute(2, 0, 3, 1, 4).unbind()
        return queries, keys, values

    def keys_values(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, key, dim]`` -> keys and values, each ``[batch, heads, key, head_dim]``."""
        return self._split(self.key(context)), self._split(self.value(context))

    def queries(self, x: Tensor) -> Tensor:
        """``[batch, query, dim]`` -> ``[batch, heads, query, head_dim]``."""
        return self._split(self.query(x))

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        pieces: Pieces | None = None,
    ) -> Tensor:
        """Attend from queries to keys and values, all projected -> ``[batch, query, dim]``."""
        return self.merge(self.attend(queries, keys, values, mask, pieces))

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        pieces: Pieces | None = None,
    ) -> Tensor:
        """`attention`, all ``[batch, heads, length, head_dim]``, as this module scales it."""
        return attention(queries, keys, values, mask, self.dropout, self.scale, pieces)

    def weights(self, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """How much each query attends to each key: ``[batch, heads, query, key]``, float32."""
        return attention_weights(queries, keys, mask, self.scale)

    def merge(self, heads: Tensor) -> Tensor:
        """``[batch, heads, query, head_dim]`` -> ``[batch, query, dim]``, then the projection."""
        merged = heads.transpose(1, 2).flatten(2)
        projected: Tensor = self.output(merged)
        return projected

    def _split(self, x: Tensor) -> Tensor:
        # [batch, length, dim] -> [batch, heads, length, head_dim]
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)
