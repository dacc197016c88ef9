"""The Transformer encoder-decoder of "Attention Is All You Need" (Vaswani et al., 2017).

A model is composed, not configured: an `Encoder` and a `Decoder` receive an embedding, a list of
layers and a final norm; a layer receives its attention, its feed-forward and the way residuals are
taken. `model/families/` holds one such composition per family of checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import MultiHeadAttention, causal_mask, mask_bias, padding_mask
from model.layers import Embedding, FeedForward, RelativePositionBias, Residual


class CrossKeysValues(Protocol):
    """What one decoder layer attends to on the source side."""

    def attend(self, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        """``[rows, query, dim]`` -> the same shape, through the layer's cross-attention."""
        ...


class SelfKeysValues(Protocol):
    """What one decoder layer has seen of the target side."""

    def attend(self, attention: MultiHeadAttention, x: Tensor, mask: Tensor | None) -> Tensor:
        """Take in new positions ``[rows, tgt, dim]``, and run the layer's self-attention on them.

        Args:
            mask: ``[rows | 1, 1 | heads, tgt, key]``, over all that may be attended to.
        """
        ...


class MemoryKeysValues:
    """Cross-attention over an encoder output, one source per row.

    Args:
        keys, values: ``[batch, heads, src, head_dim]``.
        mask: ``[batch, 1, 1, src]``, or None where no source is padded.
    """

    def __init__(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        self.keys = keys
        self.values = values
        self.mask = mask

    def attend(self, attention: MultiHeadAttention, x: Tensor) -> Tensor:
        attended: Tensor = attention(attention.queries(x), self.keys, self.values, self.mask)
        return attended


class NoPast:
    """Self-attention of a full pass: the new positions are all there is."""

    def attend(self, attention: MultiHeadAttention, x: Tensor, mask: Tensor | None) -> Tensor:
        attended: Tensor = attention(*attention.queries_keys_values(x), mask)
        return attended


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each inside its residual.

    Args:
        attention: the self-attention.
        feed_forward: position-wise network.
        residuals: one wrapper per sub-layer, in order.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: FeedForward,
        residuals: Sequence[Residual],
    ) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.residuals = nn.ModuleList(residuals)  # type: ignore[arg-type]

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``x`` ``[batch, src, dim]``, ``mask`` ``[batch, 1, 1, src]`` -> ``[batch, src, dim]``."""
        around_attention, around_feed_forward = self.residuals
        x = around_attention(
            x, lambda h: self.attention(*self.attention.queries_keys_values(h), mask)
        )
        x = around_feed_forward(x, self.feed_forward)
        return x


class DecoderLayer(nn.Module):
    """Masked self-attention, cross-attention, feed-forward, each inside its residual.

    Args:
        self_attention: over the target so far.
        cross_attention: over the encoder's output.
        feed_forward: position-wise network.
        residuals: one wrapper per sub-layer, in order.
    """

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        cross_attention: MultiHeadAttention,
        feed_forward: FeedForward,
        residuals: Sequence[Residual],
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.cross_attention = cross_attention
        self.feed_forward = feed_forward
        self.residuals = nn.ModuleList(residuals)  # type: ignore[arg-type]

    def forward(
        self, x: Tensor, past: SelfKeysValues, source: CrossKeysValues, mask: Tensor | None
    ) -> Tensor:
        """``x`` ``[rows, tgt, dim]``, ``mask`` ``[rows | 1, 1, tgt, key]`` -> shape of ``x``."""
        around_self, around_cross, around_feed_forward = self.residuals
        x = around_self(x, lambda h: past.attend(self.self_attention, h, mask))
        x = around_cross(x, lambda h: source.attend(self.cross_attention, h))
        x = around_feed_forward(x, self.feed_forward)
        return x


class Encoder(nn.Module):
    """Embedding, a stack of layers, a final norm.

    Args:
        position_bias: what self-attentions add to their scores; the paper has none.
    """

    layers: Sequence[EncoderLayer]  # an nn.ModuleList, which cannot say of what

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[EncoderLayer],
        norm: nn.Module,
        position_bias: RelativePositionBias | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = norm
        self.position_bias = position_bias

    def forward(self, src: Tensor, mask: Tensor | None) -> Tensor:
        """``src`` ``[batch, src]`` ids -> memory ``[batch, src, dim]``."""
        x = self.embedding(src)
        if self.position_bias is not None:
            every = torch.ones(1, src.shape[1], dtype=torch.bool, device=src.device)
            positions = torch.arange(src.shape[1], device=src.device)[None, :]
            mask = self.position_bias(positions, every if mask is None else mask)
        elif mask is not None:
            mask = mask_bias(mask, x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        memory: Tensor = self.norm(x)
        return memory


class Decoder(nn.Module):
    """Embedding, a stack of layers, a final norm.

    Args:
        position_bias: what self-attentions add to their scores; the paper has none.
    """

    layers: Sequence[DecoderLayer]  # an nn.ModuleList, which cannot say of what

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: nn.Module,
        position_bias: RelativePositionBias | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = norm
        self.position_bias = position_bias

    def forward(
        self,
        tgt: Tensor,
        past: Sequence[SelfKeysValues],
        source: Sequence[CrossKeysValues],
        mask: Tensor | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run ``tgt`` ``[rows, tgt]`` on top of ``past``, attending to ``source``.

        Args:
            past, source: one per layer.
            mask: ``[rows | 1, 1, tgt, key]``, over what ``past`` has and ``tgt``; None allows all
                of them, to which a single position is the last one.
            positions: ``[rows, tgt]``; default 0, 1, ...

        Returns:
            hidden states ``[rows, tgt, dim]``.
        """
        x = self.embedding(tgt, positions)
        if self.position_bias is not None:
            if positions is None:
                positions = torch.arange(tgt.shape[1], device=tgt.device)[None, :]
            if mask is None:
                mask = torch.ones(1, int(positions.max()) + 1, dtype=torch.bool, device=tgt.device)
            mask = self.position_bias(positions, mask)
        elif mask is not None:
            mask = mask_bias(mask, x.dtype)
        for layer, own_past, own_source in zip(self.layers, past, source, strict=True):
            x = layer(x, own_past, own_source, mask)
        hidden: Tensor = self.norm(x)
        return hidden

    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of ``memory``: made once per source, used at every step."""
        return [layer.cross_attention.keys_values(memory) for layer in self.layers]


@dataclass(frozen=True)
class Heads:
    """How many attention heads a model has in all its layers."""

    encoder: int
    decoder: int
    cross: int

    def weights(self, src: int, tgt: int) -> int:
        """Attention weights of one source and target of these lengths."""
        return self.encoder * src * src + self.decoder * tgt * tgt + self.cross * tgt * src


class Transformer(nn.Module):
    """Encoder, decoder and output layer.

    Args:
        encoder, decoder: the two stacks.
        output: maps hidden states to logits, ``[..., dim] -> [..., vocab]``.
        pad_id: the id that fills short rows of targets up; never counted in the loss.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder, output: nn.Module, pad_id: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.output = output
        self.pad_id = pad_id

    @property
    def heads(self) -> Heads:
        return Heads(
            encoder=sum(layer.attention.heads for layer in self.encoder.layers),
            decoder=sum(layer.self_attention.heads for layer in self.decoder.layers),
            cross=sum(layer.cross_attention.heads for layer in self.decoder.layers),
        )

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """``src`` ``[batch, src]`` ids, right-padded -> memory ``[batch, src, dim]``."""
        memory: Tensor = self.encoder(src, src_mask)
        return memory

    def decode(
        self,
        tgt: Tensor,
        memory: Tensor,
        src_mask: Tensor | None = None,
    ) -> Tensor:
        """Teacher-forced pass over whole targets.

        Right-padded targets need no mask of their own: a causal row never sees what follows it.

        Args:
            tgt: ``[batch, tgt]`` ids, decoder start first.
            memory: ``[batch, src, dim]``.
            src_mask: ``[batch, 1, 1, src]``.

        Returns:
            hidden states ``[batch, tgt, dim]``.
        """
        source = [
            MemoryKeysValues(keys, values, src_mask)
            for keys, values in self.decoder.cross_keys_values(memory)
        ]
        past = [NoPast()] * len(source)
        hidden: Tensor = self.decoder(tgt, past, source, causal_mask(tgt.shape[1], tgt.device))
        return hidden

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        targets: Tensor | None = None,
        *,
        src_lengths: Tensor | None = None,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of every target position, and the loss where targets are given.

        Args:
            src: ``[batch, src]`` ids, right-padded.
            tgt: ``[batch, tgt]`` decoder inputs, decoder start first, right-padded.
            targets: ``[batch, tgt]`` the ids to predict, ``pad_id`` where there is none.
            src_lengths: ``[batch]``; default: sources end before their trailing ``pad_id``.
            label_smoothing: mass spread over the vocabulary (section 5.4 of the paper).

        Returns:
            logits ``[batch, tgt, vocab]`` and the mean cross-entropy in nats, or None.
        """
        if src_lengths is None:
            src_lengths = lengths_before_padding(src, self.pad_id)
        src_mask = padding_mask(src_lengths, src.shape[1])
        hidden = self.decode(tgt, self.encode(src, src_mask), src_mask)
        logits: Tensor = self.output(hidden)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=self.pad_id,
            label_smoothing=label_smoothing,
        )
        return logits, loss

    def parameter_count(self, embeddings: bool = True) -> int:
        """Number of parameters, each counted once however often it is tied.

        Args:
            embeddings: False leaves token tables (and an output layer tied to one) out.
        """
        parameters = {id(p): p.numel() for p in self.parameters()}
        if not embeddings:
            for module in self.modules():
                if isinstance(module, nn.Embedding):
                    parameters.pop(id(module.weight), None)
        return sum(parameters.values())


def lengths_before_padding(ids: Tensor, pad_id: int) -> Tensor:
    """``[batch, length]`` right-padded ids -> ``[batch]`` lengths without trailing padding."""
    real = ids != pad_id
    positions = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    return (real * positions).amax(dim=1)


def initialise(model: nn.Module, std: float = 0.02) -> None:
    """Normal(0, std) for every matrix, zero for biases, one and zero for norms (left as built)."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:  # tables of positions too
                nn.init.normal_(parameter, mean=0.0, std=std)
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(parameter)
