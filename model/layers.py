"""The parts a Transformer is made of, each readable on its own; attention is next door.

Shapes are written as ``[batch, length, dim]``.

References:
    Vaswani et al., "Attention Is All You Need", 2017 (https://arxiv.org/abs/1706.03762).
    Ba et al., "Layer Normalization", 2016 (https://arxiv.org/abs/1607.06450).
    Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020
    (https://arxiv.org/abs/2002.04745), for pre-norm against post-norm.
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019
    (https://arxiv.org/abs/1910.07467).
    Raffel et al., "Exploring the Limits of Transfer Learning", 2019
    (https://arxiv.org/abs/1910.10683), for relative position biases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SOFTNESS = 0.05
"""Over which part of the spread mass unsmoothing bends to zero; rounding grows by its inverse."""

Sublayer = Callable[[Tensor], Tensor]
Activation = Callable[[Tensor], Tensor]


# --- positions ---------------------------------------------------------------------------------


LARGEST_TABLE = 2**28
"""Numbers in a table of position encodings, which no file's size bounds."""


def sinusoidal_table(length: int, dim: int, base: float = 10000.0) -> Tensor:
    """Position encodings of section 3.5 of the paper.

    ``table[p, 2i] = sin(p / base^(2i/dim))`` and ``table[p, 2i+1] = cos(p / base^(2i/dim))``.

    Returns:
        ``[length, dim]``, float32. An odd ``dim`` ends on a sine.
    """
    if length * dim > LARGEST_TABLE:
        raise ValueError(f"{length} positions of {dim} numbers would take more memory than allowed")
    with torch.device("cpu"):  # real numbers also where a model is only sketched on "meta"
        position = torch.arange(length, dtype=torch.float64)[:, None]  # [length, 1]
        even = torch.arange(0, dim, 2, dtype=torch.float64)
        angle = position * torch.exp(even * (-math.log(base) / dim))  # [length, ceil(dim / 2)]
        table = torch.empty(length, dim, dtype=torch.float64)
        table[:, 0::2] = angle.sin()
        table[:, 1::2] = angle[:, : dim // 2].cos()
        return table.float()


def halved_sinusoidal_table(length: int, dim: int, base: float = 10000.0) -> Tensor:
    """The same numbers as `sinusoidal_table`: all sines first, then all cosines."""
    table = sinusoidal_table(length, dim, base)
    return torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)


class FixedPositions(nn.Module):
    """Position encodings that are computed, not learned, looked up by position.

    Args:
        table: ``[length, dim]``; positions ``0 .. length - 1`` exist.
    """

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """``[batch, length]`` positions -> ``[batch, length, dim]`` encodings."""
        return F.embedding(positions, self.table)


class SinusoidalPositions(FixedPositions):
    """The paper's position encodings.

    Args:
        max_length: positions ``0 .. max_length - 1`` exist.
        dim: width of an encoding.
    """

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__(sinusoidal_table(max_length, dim))


class LearnedPositions(nn.Module):
    """Position encodings from a table of weights.

    Args:
        max_length: positions ``0 .. max_length - 1`` exist.
        dim: width of an encoding.
        offset: the table's row of position 0; the rows before it are not used.
    """

    def __init__(self, max_length: int, dim: int, offset: int = 0) -> None:
        super().__init__()
        self.weight = token_table(max_length + offset, dim).weight
        self.offset = offset

    def forward(self, positions: Tensor) -> Tensor:
        """``[batch, length]`` positions -> ``[batch, length, dim]`` encodings."""
        return F.embedding(positions + self.offset, self.weight)


class NoPositions(nn.Module):
    """For stacks in which only attention knows of positions."""

    def forward(self, positions: Tensor) -> Tensor:
        """A zero, which changes no token vector."""
        return positions.new_zeros(())


def relative_buckets(buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Which bucket a relative position, key minus query, falls into.

    Of the buckets of one direction the first half holds one distance each; the others grow in
    width with the logarithm up to ``max_distance``, and the last one holds all that is farther.

    Args:
        buckets: of both directions together where ``bidirectional``, which then has to be even.
        bidirectional: whether keys behind the query have buckets of their own, the upper half;
            otherwise they share that of distance 0.

    Returns:
        ``[2 * max_distance + 1]`` buckets of ``-max_distance .. max_distance``.
    """
    with torch.device("cpu"):  # real numbers also where a model is only sketched on "meta"
        relative = torch.arange(-max_distance, max_distance + 1)
        distance = relative.abs() if bidirectional else (-relative).clamp(min=0)
        directed = buckets // 2 if bidirectional else buckets
        exact = directed // 2
        # In float32 and in this order, as the models were trained: borders between buckets are
        # where a logarithm is a whole number, and rounding decides.
        ratio = torch.log(distance.float() / exact) / math.log(max_distance / exact)
        far = exact + (ratio.clamp(min=0.0) * (directed - exact)).long()
        bucket = torch.where(distance < exact, distance, far.clamp(max=directed - 1))
        return bucket + directed * (relative > 0) if bidirectional else bucket


class RelativePositionBias(nn.Module):
    """A learned number per head and bucket of relative positions, added to attention scores.

    Section 2.1 of Raffel et al. One table serves all layers of a stack.

    Args:
        heads: of every layer.
        buckets, max_distance, bidirectional: see `relative_buckets`.

    Raises:
        ValueError: the buckets of a direction cannot be told apart.
    """

    buckets: Tensor

    def __init__(self, heads: int, buckets: int, max_distance: int, bidirectional: bool) -> None:
        super().__init__()
        directed = buckets // 2 if bidirectional else buckets
        if directed < 2 or (bidirectional and buckets % 2) or max_distance <= directed // 2:
            raise ValueError(
                f"cannot sort distances up to {max_distance} into {buckets} buckets"
                f"{' for two directions' if bidirectional else ''}"
            )
        self.max_distance = max_distance
        self.weight = token_table(buckets, heads).weight
        of_distance = relative_buckets(buckets, max_distance, bidirectional)
        self.register_buffer("buckets", of_distance, persistent=False)

    def forward(self, positions: Tensor, mask: Tensor) -> Tensor:
        """The bias of queries at ``positions`` on keys at ``0 .. key - 1``.

        Args:
            positions: ``[rows | 1, query]``, each counted from its row's own first token.
            mask: boolean, ``[rows | 1, 1, query | 1, key]``; or ``[query, key]``.

        Returns:
            ``[rows, heads, query, key]``; -inf where the mask forbids.
        """
        limit = self.max_distance
        keys = torch.arange(mask.shape[-1], device=positions.device)
        relative = (keys - positions[..., None]).clamp(-limit, limit)  # [rows, query, key]
        by_distance = self.weight.t()[:, self.buckets]  # [heads, 2 * max_distance + 1]
        # [heads, rows, query, key] -> [rows, heads, query, key]
        bias = by_distance[:, relative + limit].transpose(0, 1)
        return bias.masked_fill(~mask, -torch.inf)


def token_table(vocab_size: int, dim: int) -> nn.Embedding:
    """A table whose numbers are still to come, from a file or from `initialise`.

    The library's own draws them at once, which for a model that is only sketched costs a second.
    """
    return nn.Embedding(vocab_size, dim, _weight=torch.empty(vocab_size, dim))


class Embedding(nn.Module):
    """Token embedding plus position encoding, with the dropout of section 5.4.

    Args:
        tokens: the token table.
        positions: maps positions to encodings of the same width.
        scale: factor on the token vectors; the paper uses ``sqrt(dim)``, the tutorial 1.
        dropout: probability of zeroing an element while training.
        sum_norm: applied to the sum; the paper has none.
    """

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: nn.Module,
        scale: float = 1.0,
        dropout: float = 0.0,
        sum_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.scale = scale
        self.sum_norm = nn.Identity() if sum_norm is None else sum_norm
        self.dropout = Dropout(dropout)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """``[batch, length]`` ids -> ``[batch, length, dim]``.

        ``positions`` defaults to ``0 .. length - 1`` for every row.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None, :]
        embedded = self.tokens(ids) * self.scale + self.positions(positions)
        # Encodings stay float32 in a half-precision model; the sum is rounded once.
        dropped: Tensor = self.dropout(self.sum_norm(embedded.to(self.tokens.weight.dtype)))
        return dropped


# --- feed-forward, normalisation, residual ------------------------------------------------------


class FeedForward(nn.Module):
    """Section 3.3: ``activation(x W1 + b1) W2 + b2``, applied to each position.

    Args:
        dim: width of the model.
        hidden: width between the two linear layers.
        activation: element by element; the paper's is ReLU.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        bias: bool = True,
        dropout: float = 0.0,
        activation: Activation = F.relu,
    ) -> None:
        super().__init__()
        self.expand = nn.Linear(dim, hidden, bias=bias)
        self.contract = nn.Linear(hidden, dim, bias=bias)
        self.activation = activation
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, dim]`` -> the same shape."""
        contracted: Tensor = self.contract(self.dropout(self.activation(self.expand(x))))
        return contracted


class LayerNorm(nn.LayerNorm):
    """``weight * (x - mean) / sqrt(variance + eps) + bias`` over the last dimension."""


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension; no mean is taken off.

    Computed in float32, whatever ``x`` is; the answer has the weight's dtype.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., dim]`` -> the same shape."""
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return normed.to(self.weight.dtype) * self.weight


class BesselLayerNorm(nn.Module):
    """``weight * (x - mean) / (std + eps) + bias`` over the last dimension, as the tutorial has it.

    Two differences from `LayerNorm`: ``std`` is Bessel-corrected (divided by dim - 1, not dim), and
    ``eps`` is added to it, not to the variance. Computed in float32.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., dim]`` -> the same shape."""
        wide = x.float()
        std, mean = torch.std_mean(wide, dim=-1, correction=1, keepdim=True)
        normed = self.weight.float() * (wide - mean) / (std + self.eps) + self.bias.float()
        return normed.to(x.dtype)


class Dropout(nn.Module):
    """Zero each element with probability p while training and scale the rest by 1 / (1 - p).

    The probability is rounded to 1/256: one random byte per element costs a tenth of the
    random float that ``torch.nn.Dropout`` draws on a CPU, where it was a third of a training step.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {p}")
        self.p = p
        self._threshold = min(255, round(p * 256))

    @property
    def active(self) -> bool:
        return self.training and self._threshold > 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.active:
            return x
        threshold = self._threshold
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64, device=x.device)
        words.random_(-(2**63), None)  # 64 random bits each
        random_bytes = words.view(torch.uint8)[: x.numel()].view(x.shape)
        # 0 where byte < threshold, else 1: byte arithmetic is vectorised where comparisons are not.
        keep = random_bytes.clamp_(threshold - 1, threshold).sub_(threshold - 1)
        return x * keep.to(x.dtype).mul_(256.0 / (256 - threshold))


class Residual(Protocol):
    """How a sub-layer is wrapped: ``(x, sublayer) -> x'``, shapes unchanged."""

    def __call__(self, x: Tensor, sublayer: Sublayer) -> Tensor: ...


class PreNorm(nn.Module):
    """``x + dropout(sublayer(norm(x)))``: trains without warm-up tricks (Xiong et al.)."""

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        branch: Tensor = self.dropout(sublayer(self.norm(x)))
        return x + branch


class PostNorm(nn.Module):
    """``norm(x + dropout(sublayer(x)))``: the paper's own arrangement."""

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        normed: Tensor = self.norm(x + self.dropout(sublayer(x)))
        return normed


class NormalizedResidual(nn.Module):
    """``h + dropout(sublayer(h))``, ``h = norm(x)``: what skips the sub-layer is normalised too.

    A slip of the tutorial's code (its text has `PreNorm`) that checkpoints were trained with.
    """

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        normed: Tensor = self.norm(x)
        branch: Tensor = self.dropout(sublayer(normed))
        return normed + branch


# --- output ------------------------------------------------------------------------------------


class BiasedOutput(nn.Module):
    """An output layer and a bias on its logits.

    Args:
        projection: ``[..., dim] -> [..., vocab]``, often tied to an embedding.
        vocab_size: width of the bias, which is kept as ``[1, vocab]``, as checkpoints have it.
    """

    def __init__(self, projection: nn.Linear, vocab_size: int) -> None:
        super().__init__()
        self.projection = projection
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(1, vocab_size))

    def join_bias(self) -> None:
        """Let the output layer add the bias, on its way through the logits."""
        if self.bias is not None:
            self.projection.bias = nn.Parameter(self.bias.detach()[0], requires_grad=False)
            self.bias = None

    def forward(self, hidden: Tensor) -> Tensor:
        """``[rows, dim]`` -> ``[rows, vocab]``."""
        logits: Tensor = self.projection(hidden)
        return logits if self.bias is None else logits + self.bias


class UnsmoothedOutput(nn.Module):
    """An output layer that takes the label smoothing of its training back out.

    A model trained on targets of ``(1 - s) p + s / vocab`` (section 5.4 of the paper) learns to say
    that in place of ``p``: never sure, with some probability for every token. Solved for ``p``, its
    probabilities are those of the data again. The order of tokens stays.

    Args:
        projection: ``[..., dim] -> [..., vocab]``, often tied to an embedding.
        smoothing: ``s``, the mass that was spread over the vocabulary.
    """

    def __init__(self, projection: nn.Linear, smoothing: float) -> None:
        super().__init__()
        self.projection = projection
        self.smoothing = smoothing

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., dim]`` -> ``[..., vocab]``."""
        smoothed = self.projection(hidden).float().log_softmax(dim=-1)
        spread = self.smoothing / smoothed.shape[-1]
        # q - spread, bent so that it stays above zero and rising: where q is near the spread mass,
        # the plain difference is of nearly equal numbers, and rounding would show in its logarithm.
        bend = SOFTNESS * spread
        unsmoothed: Tensor = (bend * F.softplus((smoothed.exp() - spread) / bend)).log()
        return unsmoothed.to(hidden.dtype)


class ScaledOutput(nn.Module):
    """An output layer on hidden states times a factor.

    Args:
        projection: ``[..., dim] -> [..., vocab]``, often tied to an embedding.
        scale: the factor.
    """

    def __init__(self, projection: nn.Linear, scale: float) -> None:
        super().__init__()
        self.projection = projection
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        """``[rows, dim]`` -> ``[rows, vocab]``."""
        logits: Tensor = self.projection(hidden * self.scale)
        return logits
