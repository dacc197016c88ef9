"""The whole Transformer against torch's own and against sums done by hand; its masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import model.transformer
from model.attention import MultiHeadAttention, padding_mask
from model.families.seqserve import TransformerConfig, build
from model.layers import Embedding, FeedForward, LayerNorm, PostNorm, PreNorm, SinusoidalPositions
from model.transformer import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    Transformer,
    initialise,
    lengths_before_padding,
)
from tests.builders import lively_network

VOCAB, DIM, HEADS, HIDDEN = 13, 16, 4, 24
CONFIG = TransformerConfig(
    VOCAB,
    VOCAB,
    dim=DIM,
    heads=HEADS,
    hidden_dim=HIDDEN,
    encoder_layers=2,
    decoder_layers=2,
    max_src=20,
    max_tgt=20,
    dropout=0.1,
    tie_output=False,
)


@pytest.fixture
def network() -> Transformer:
    return lively_network(CONFIG, seed=3)


def ids(*rows: Sequence[int]) -> Tensor:
    """Right-padded with 0."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


SRC = ids([5, 6, 7, 8, 2], [9, 2], [4, 4, 10, 2])
TGT = ids([1, 7, 8], [1, 5, 6, 11, 12, 4], [1])
TARGETS = ids([7, 8, 2], [5, 6, 11, 12, 4, 2], [2])


# --- shapes and loss ---------------------------------------------------------------------------


def test_forward_returns_logits_of_every_target_position_and_no_loss_without_targets(
    network: Transformer,
) -> None:
    logits, loss = network(SRC, TGT)
    assert logits.shape == (3, 6, VOCAB)
    assert loss is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_mean_cross_entropy_over_real_targets(
    network: Transformer, smoothing: float
) -> None:
    logits, loss = network(SRC, TGT, TARGETS, label_smoothing=smoothing)
    losses = []
    for row, wanted in zip(logits.tolist(), TARGETS.tolist(), strict=True):
        for scores, target in zip(row, wanted, strict=True):
            if target == 0:
                continue
            total = math.log(math.fsum(math.exp(score) for score in scores))
            hit = total - scores[target]
            spread = math.fsum(total - score for score in scores) / VOCAB
            losses.append((1 - smoothing) * hit + smoothing * spread)
    assert loss is not None
    assert len(losses) == 10
    assert loss.item() == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)


def test_loss_does_not_change_with_padding(network: Transformer) -> None:
    _, loss = network(SRC, TGT, TARGETS)
    wide = nn.functional.pad
    _, padded = network(wide(SRC, (0, 3)), wide(TGT, (0, 4)), wide(TARGETS, (0, 4)))
    assert padded.item() == pytest.approx(loss.item(), rel=1e-6)


# --- masks -------------------------------------------------------------------------------------


def largest_change_by_padding(network: Transformer) -> float:
    """How far a batch's logits lie from those of each row alone, over real positions."""
    batch, _ = network(SRC, TGT)
    changes = []
    for row, (src, tgt) in enumerate(zip(SRC, TGT, strict=True)):
        real_src, real_tgt = src[src != 0], tgt[tgt != 0]
        alone, _ = network(real_src[None], real_tgt[None])
        changes.append((batch[row, : len(real_tgt)] - alone[0]).abs().max().item())
    return max(changes)


@torch.no_grad()
def test_padding_changes_nothing(network: Transformer) -> None:
    assert largest_change_by_padding(network) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("broken", ["encoder", "cross"])
def test_the_padding_test_is_sharp(
    network: Transformer, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "encoder":
        monkeypatch.setattr(network, "encode", lambda src, mask: network.encoder(src, None))
    else:
        decode = network.decode
        monkeypatch.setattr(network, "decode", lambda tgt, memory, mask: decode(tgt, memory, None))
    assert largest_change_by_padding(network) > 0.05


@torch.no_grad()
def test_explicit_source_lengths_win_over_trailing_padding_ids(network: Transformer) -> None:
    src = torch.tensor([[5, 6, 0, 0]])
    short, _ = network(src, TGT[:1])
    whole, _ = network(src, TGT[:1], src_lengths=torch.tensor([4]))
    assert torch.equal(short, network(src, TGT[:1], src_lengths=torch.tensor([2]))[0])
    assert not torch.allclose(short, whole, atol=0.01)


def test_lengths_count_what_lies_before_trailing_padding() -> None:
    rows = torch.tensor([[5, 0, 6, 0], [0, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 9]])
    assert lengths_before_padding(rows, 0).tolist() == [3, 0, 4, 4]
    assert lengths_before_padding(rows, -1).tolist() == [4, 4, 4, 4]


def largest_change_by_the_future(network: Transformer) -> float:
    """How far logits of positions 0 .. 2 move when later tokens change."""
    src = SRC[:1]
    before, _ = network(src, torch.tensor([[1, 7, 8, 9, 10]]))
    after, _ = network(src, torch.tensor([[1, 7, 8, 4, 12]]))
    assert (before[:, 3:] - after[:, 3:]).abs().max() > 0.05  # what changed does matter
    return (before[:, :3] - after[:, :3]).abs().max().item()


@torch.no_grad()
def test_the_future_changes_no_past_logits(network: Transformer) -> None:
    assert largest_change_by_the_future(network) < 1e-6


@torch.no_grad()
def test_the_causality_test_is_sharp(network: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def see_all(length: int, device: torch.device | None = None) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=device)

    monkeypatch.setattr(model.transformer, "causal_mask", see_all)
    assert largest_change_by_the_future(network) > 0.05


@torch.no_grad()
def test_the_source_decides_the_logits(network: Transformer) -> None:
    one, _ = network(torch.tensor([[5, 6, 2]]), TGT[:1])
    other, _ = network(torch.tensor([[6, 5, 2]]), TGT[:1])  # the same letters in another order
    assert (one - other).abs().max() > 0.05


# --- torch's own Transformer -------------------------------------------------------------------


def compose(norm_first: bool) -> Transformer:
    """Two layers a side, as `nn.Transformer(norm_first=...)` has them."""
    arrangement = PreNorm if norm_first else PostNorm

    def embedding() -> Embedding:
        return Embedding(nn.Embedding(VOCAB, DIM), SinusoidalPositions(20, DIM))

    def residuals(count: int) -> list[PreNorm] | list[PostNorm]:
        return [arrangement(LayerNorm(DIM)) for _ in range(count)]  # type: ignore[return-value]

    def attention() -> MultiHeadAttention:
        return MultiHeadAttention(DIM, HEADS)

    def feed_forward() -> FeedForward:
        return FeedForward(DIM, HIDDEN)

    encoder_layers = [EncoderLayer(attention(), feed_forward(), residuals(2)) for _ in range(2)]
    decoder_layers = [
        DecoderLayer(attention(), attention(), feed_forward(), residuals(3)) for _ in range(2)
    ]
    return Transformer(
        Encoder(embedding(), encoder_layers, LayerNorm(DIM)),
        Decoder(embedding(), decoder_layers, LayerNorm(DIM)),
        nn.Linear(DIM, VOCAB, bias=False),
        pad_id=0,
    ).eval()


def copy_attention(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
    parts = (ours.query, ours.key, ours.value)
    theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
    theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def copy_layer(theirs: nn.Module, ours: EncoderLayer | DecoderLayer) -> None:
    """Into an `nn.TransformerEncoderLayer` or `nn.TransformerDecoderLayer`."""
    if isinstance(ours, EncoderLayer):
        copy_attention(theirs.self_attn, ours.attention)  # type: ignore[arg-type]
    else:
        copy_attention(theirs.self_attn, ours.self_attention)  # type: ignore[arg-type]
        copy_attention(theirs.multihead_attn, ours.cross_attention)  # type: ignore[arg-type]
    theirs.get_submodule("linear1").load_state_dict(ours.feed_forward.expand.state_dict())
    theirs.get_submodule("linear2").load_state_dict(ours.feed_forward.contract.state_dict())
    for i, residual in enumerate(ours.residuals, start=1):
        theirs.get_submodule(f"norm{i}").load_state_dict(
            residual.get_submodule("norm").state_dict()
        )


def torch_transformer(ours: Transformer, norm_first: bool) -> nn.Transformer:
    theirs = nn.Transformer(
        DIM, HEADS, 2, 2, HIDDEN, dropout=0.0, norm_first=norm_first, batch_first=True
    )
    theirs.encoder.use_nested_tensor = False
    for stack, our_stack in ((theirs.encoder, ours.encoder), (theirs.decoder, ours.decoder)):
        for layer, our_layer in zip(stack.layers, our_stack.layers, strict=True):
            copy_layer(layer, our_layer)
        stack.norm.load_state_dict(our_stack.norm.state_dict())
    return theirs.eval()


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch's, about itself
def test_logits_equal_those_of_torchs_transformer(norm_first: bool) -> None:
    torch.manual_seed(4)
    ours = compose(norm_first)
    for parameter in ours.parameters():
        parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    theirs = torch_transformer(ours, norm_first)
    src_lengths = torch.tensor([5, 2, 4])
    hidden = ~padding_mask(src_lengths, SRC.shape[1])[:, 0, 0]
    found, _ = ours(SRC, TGT)
    expected = ours.output(
        theirs(
            ours.encoder.embedding(SRC),
            ours.decoder.embedding(TGT),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(TGT.shape[1]).isinf(),
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
        )
    )
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# --- initialisation, counts, dropout -----------------------------------------------------------


def test_initial_weights_are_normal_biases_zero_and_norms_neutral() -> None:
    torch.manual_seed(0)
    network = build(
        TransformerConfig(100, 90, dim=64, heads=4, hidden_dim=128, max_src=8, max_tgt=8)
    )
    for name, parameter in network.named_parameters():
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.001, name
        elif "norm" in name and name.endswith("weight"):
            assert parameter.eq(1).all(), name
        else:
            assert parameter.eq(0).all(), name


def test_no_weight_is_left_as_memory_was(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def rubbish(*size: int, **options: Any) -> Tensor:
        return empty(*size, **options).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", rubbish)
    shape = TransformerConfig(9, 7, 16, 2, 32, max_src=8, max_tgt=8, relative_positions=True)
    for name, parameter in build(shape).named_parameters():
        assert parameter.isfinite().all(), name


def test_initial_spread_can_be_chosen() -> None:
    layer = nn.Linear(100, 100)
    initialise(layer, std=0.5)
    assert layer.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert layer.bias.eq(0).all()


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_once_with_and_without_embeddings(tied: bool) -> None:
    network = build(
        TransformerConfig(
            7,
            9,
            dim=8,
            heads=2,
            hidden_dim=12,
            encoder_layers=1,
            decoder_layers=2,
            tie_output=tied,
        )
    )
    attention, norm = 4 * (8 * 8 + 8), 2 * 8
    feed_forward = (8 * 12 + 12) + (12 * 8 + 8)
    encoder = attention + feed_forward + 2 * norm + norm
    decoder = 2 * (2 * attention + feed_forward + 3 * norm) + norm
    tables, output = 7 * 8 + 9 * 8, 0 if tied else 9 * 8
    assert network.parameter_count() == encoder + decoder + tables + output
    assert network.parameter_count(embeddings=False) == encoder + decoder + output


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    network = build(CONFIG)
    network.train()
    assert not torch.equal(network(SRC, TGT)[0], network(SRC, TGT)[0])
    network.eval()
    assert torch.equal(network(SRC, TGT)[0], network(SRC, TGT)[0])


def test_dropout_stands_on_embedding_attention_weights_and_residual_branches() -> None:
    network = build(CONFIG)
    dropped = {
        name.rsplit(".", 1)[0]
        for name, module in network.named_modules()
        if name.endswith("dropout") and module.p == CONFIG.dropout  # type: ignore[operator]
    }
    assert {"encoder.embedding", "decoder.embedding"} <= dropped
    assert {f"encoder.layers.0.{part}" for part in ("attention", "residuals.0")} <= dropped
    parts = ("self_attention", "cross_attention", "residuals.0", "residuals.1", "residuals.2")
    assert {f"decoder.layers.1.{part}" for part in parts} <= dropped


def test_a_training_step_lowers_the_loss() -> None:
    torch.manual_seed(0)
    network = build(CONFIG).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        _, loss = network(SRC, TGT, TARGETS)
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert losses[-1] < 0.5 * losses[0]
