"""Each part of the Transformer against numbers worked out by hand and against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from model.attention import (
    MultiHeadAttention,
    causal_mask,
    padding_mask,
)
from model.layers import (
    BesselLayerNorm,
    BiasedOutput,
    Dropout,
    Embedding,
    FeedForward,
    LayerNorm,
    LearnedPositions,
    NormalizedResidual,
    PostNorm,
    PreNorm,
    RelativePositionBias,
    RMSNorm,
    ScaledOutput,
    SinusoidalPositions,
    UnsmoothedOutput,
    halved_sinusoidal_table,
    relative_buckets,
    sinusoidal_table,
    token_table,
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(found: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)


# --- positions ---------------------------------------------------------------------------------


def test_sinusoidal_table_equals_hand_computed_values() -> None:
    table = sinusoidal_table(3, 4)
    # Frequencies 1 and 1 / 10000^(2/4) = 0.01; sine, cosine, sine, cosine.
    expected = [
        [0.0, 1.0, 0.0, 1.0],
        [0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004],
        [0.9092974268, -0.4161468365, 0.0199986667, 0.9998000067],
    ]
    close(table, torch.tensor(expected))


def test_sinusoidal_table_of_odd_width_ends_on_a_sine() -> None:
    table = sinusoidal_table(5, 5)
    assert table.shape == (5, 5)
    close(table[:, 4], torch.tensor([math.sin(p / 10000 ** (4 / 5)) for p in range(5)]))


def test_sinusoidal_table_is_exact_at_positions_far_out() -> None:
    table = sinusoidal_table(100_001, 6)
    for p in (4_096, 65_537, 100_000):
        angles = [p / 10000 ** (2 * i / 6) for i in range(3)]
        expected = [f(angle) for angle in angles for f in (math.sin, math.cos)]
        close(table[p], torch.tensor(expected))


def test_sinusoidal_table_takes_another_base() -> None:
    close(sinusoidal_table(2, 4, base=100.0)[1, 2], torch.tensor(math.sin(0.1)))


def test_positions_are_looked_up_row_by_row() -> None:
    positions = SinusoidalPositions(8, 4)
    found = positions(torch.tensor([[0, 3], [5, 1]]))
    table = sinusoidal_table(8, 4)
    assert torch.equal(found, torch.stack([table[[0, 3]], table[[5, 1]]]))


def test_position_table_is_real_and_unsaved_also_in_a_sketched_model() -> None:
    with torch.device("meta"):
        positions = SinusoidalPositions(8, 4)
    assert positions.table.device.type == "cpu"
    assert positions.state_dict() == {}


def test_embedding_scales_tokens_and_adds_positions_counted_from_zero() -> None:
    tokens = nn.Embedding(3, 2)
    with torch.no_grad():
        tokens.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    embedding = Embedding(tokens, SinusoidalPositions(4, 2), scale=10.0)
    found = embedding(torch.tensor([[2, 0]]))
    expected = [[[50 + 0.0, 60 + 1.0], [10 + math.sin(1), 20 + math.cos(1)]]]
    close(found, torch.tensor(expected))


def test_embedding_takes_positions_of_its_own_for_each_row() -> None:
    embedding = Embedding(nn.Embedding(5, 4), SinusoidalPositions(9, 4))
    whole = embedding(torch.tensor([[1, 2, 3, 4]]))
    step = embedding(torch.tensor([[3], [2]]), torch.tensor([[2], [1]]))
    assert torch.equal(step[:, 0], whole[0, [2, 1]])


# --- feed-forward and norms --------------------------------------------------------------------


def test_feed_forward_equals_a_hand_computed_example() -> None:
    layer = FeedForward(2, 3)
    with torch.no_grad():
        layer.expand.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
        layer.expand.bias.copy_(torch.tensor([0.0, -1.0, 0.5]))
        layer.contract.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 1.0]]))
        layer.contract.bias.copy_(torch.tensor([0.5, 0.0]))
    # [2, 3] -> relu [2, 2, -4.5] = [2, 2, 0] -> [2 + 4 + 0.5, -2]
    close(layer(torch.tensor([[[2.0, 3.0]]])), torch.tensor([[[6.5, -2.0]]]))


def test_layer_norm_follows_its_formula() -> None:
    norm = LayerNorm(4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        norm.bias.fill_(0.5)
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])  # mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5
    scale = math.sqrt(3.5 + 1e-5)
    expected = [1 * -2 / scale + 0.5, 2 * -1 / scale + 0.5, 0.5, 4 * 3 / scale + 0.5]
    close(norm(x), torch.tensor(expected))


def test_bessel_layer_norm_divides_by_dim_less_one_and_adds_eps_to_the_deviation() -> None:
    norm = BesselLayerNorm(4, eps=0.1)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        norm.bias.fill_(0.5)
    x = torch.tensor([1.0, 2.0, 3.0, 6.0])  # mean 3, std sqrt((4 + 1 + 0 + 9) / 3)
    scale = math.sqrt(14 / 3) + 0.1
    expected = [1 * -2 / scale + 0.5, 2 * -1 / scale + 0.5, 0.5, 4 * 3 / scale + 0.5]
    close(norm(x), torch.tensor(expected))


def test_bessel_layer_norm_of_equal_elements_is_its_bias() -> None:
    norm = BesselLayerNorm(3)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    close(norm(torch.full((2, 3), 7.0)), torch.tensor([[1.0, 2.0, 3.0]] * 2))


# --- dropout -----------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_dropout_zeroes_its_share_and_scales_the_rest(p: float) -> None:
    x = torch.ones(100_003)
    found = Dropout(p).train()(x)
    dropped = (found == 0).float().mean().item()
    step = round(p * 256) / 256
    assert dropped == pytest.approx(step, abs=5 * math.sqrt(p * (1 - p) / 100_003))
    close(found[found != 0], torch.full_like(found[found != 0], 1 / (1 - step)))
    assert found.mean().item() == pytest.approx(1.0, abs=0.03)


def test_dropout_draws_anew_and_independently_of_position() -> None:
    layer = Dropout(0.5).train()
    first, second = layer(torch.ones(4096)) != 0, layer(torch.ones(4096)) != 0
    for one, other in ((first, second), (first[1:], first[:-1]), (first[8:], first[:-8])):
        agreement = (one == other).float().mean().item()
        assert agreement == pytest.approx(0.5, abs=0.05)


def test_dropout_is_off_in_evaluation_and_without_probability() -> None:
    x = torch.randn(3, 5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x


def test_dropout_passes_gradients_where_it_passes_values() -> None:
    x = torch.ones(1000, requires_grad=True)
    found = Dropout(0.5).train()(x)
    found.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, found.detach())


def test_dropout_next_to_one_stays_finite() -> None:
    found = Dropout(0.999).train()(torch.ones(10_000))
    assert found.isfinite().all()
    assert 0 < (found != 0).float().mean() < 0.02


@pytest.mark.parametrize("p", [-0.1, 1.0, math.nan])
def test_dropout_refuses_what_is_no_probability(p: float) -> None:
    with pytest.raises(ValueError, match="dropout"):
        Dropout(p)


def test_dropout_keeps_the_dtype() -> None:
    assert Dropout(0.3).train()(torch.ones(7, dtype=torch.bfloat16)).dtype == torch.bfloat16


# --- residuals ---------------------------------------------------------------------------------


class Halve(nn.Module):
    """Stands in for a norm, so that where it is applied can be read off a sum."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_residual_arrangements_differ_in_what_is_normalised() -> None:
    x = torch.tensor([8.0])

    def plus_one(h: Tensor) -> Tensor:
        return h + 1

    assert PreNorm(Halve())(x, plus_one).item() == 8 + (4 + 1)
    assert PostNorm(Halve())(x, plus_one).item() == (8 + 9) / 2
    assert NormalizedResidual(Halve())(x, plus_one).item() == 4 + (4 + 1)


@pytest.mark.parametrize("arrangement", [PreNorm, NormalizedResidual, PostNorm])
def test_residuals_drop_only_the_branch(
    arrangement: type[PreNorm] | type[NormalizedResidual] | type[PostNorm],
) -> None:
    layer = arrangement(nn.Identity(), 0.5).train()
    found = layer(torch.ones(1000), lambda h: h)
    assert sorted(set(found.tolist())) == [1.0, 3.0]  # what skips the sub-layer is never dropped


# --- half precision ----------------------------------------------------------------------------


def test_layers_in_bfloat16_stay_near_float32_and_in_their_dtype() -> None:
    x = torch.randn(2, 5, 16)
    embedding = Embedding(nn.Embedding(9, 16), SinusoidalPositions(8, 16), 4.0)
    self_attention = MultiHeadAttention(16, 4)
    feed_forward = FeedForward(16, 32)
    norms = (LayerNorm(16), BesselLayerNorm(16))
    ids = torch.tensor([[1, 2, 3]])

    def outputs(x: Tensor) -> list[Tensor]:
        attended = self_attention(*self_attention.queries_keys_values(x), causal_mask(5))
        return [embedding(ids), attended, feed_forward(x), *(norm(x) for norm in norms)]

    with torch.no_grad():
        expected = outputs(x)
        for layer in (embedding, self_attention, feed_forward, *norms):
            # buffers stay float32, as the loader leaves them
            for parameter in layer.parameters():
                parameter.data = parameter.data.bfloat16()
        found = outputs(x.bfloat16())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other, atol=0.05, rtol=0.05)


# --- parts of published families -----------------------------------------------------------------


def test_halved_positions_are_the_papers_in_another_order() -> None:
    paper, halved = sinusoidal_table(7, 6), halved_sinusoidal_table(7, 6)
    assert torch.equal(halved[:, :3], paper[:, 0::2])
    assert torch.equal(halved[:, 3:], paper[:, 1::2])
    assert halved_sinusoidal_table(3, 5).shape == (3, 5)


def test_learned_positions_begin_behind_the_offset() -> None:
    positions = LearnedPositions(4, 3, offset=2)
    with torch.no_grad():
        positions.weight.copy_(torch.arange(18.0).reshape(6, 3))
    assert positions(torch.tensor([[0, 3]])).tolist() == [[[6.0, 7.0, 8.0], [15.0, 16.0, 17.0]]]


def test_a_norm_may_follow_the_sum_of_token_and_position() -> None:
    norm = LayerNorm(4)
    tokens, positions = token_table(5, 4), LearnedPositions(3, 4)
    with torch.no_grad():
        tokens.weight.normal_()
        positions.weight.normal_()
    ids = torch.tensor([[1, 4, 2]])
    plain = Embedding(tokens, positions, 2.0)
    assert torch.equal(Embedding(tokens, positions, 2.0, sum_norm=norm)(ids), norm(plain(ids)))


def test_a_feed_forward_takes_its_activation() -> None:
    network = FeedForward(2, 3, activation=torch.tanh)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.5)
    x = torch.tensor([1.0, 2.0])
    assert torch.allclose(network(x), 3 * 0.5 * torch.tanh(torch.tensor(2.0)) + 0.5)


def test_an_output_may_have_a_bias_of_its_own() -> None:
    projection = torch.nn.Linear(2, 3, bias=False)
    output = BiasedOutput(projection, 3)
    with torch.no_grad():
        output.bias.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    hidden = torch.randn(4, 2)
    expected = projection(hidden) + torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(output(hidden), expected)
    output.join_bias()
    close(output(hidden), expected)
    assert [name for name, _ in output.named_parameters()] == [
        "projection.weight",
        "projection.bias",
    ]


# --- relative positions --------------------------------------------------------------------------


def test_relative_buckets_hold_one_distance_and_then_ever_more() -> None:
    causal = relative_buckets(buckets=6, max_distance=10, bidirectional=False)
    of_distance = causal[:11].flip(0).tolist()  # 0, 1, 2, ... tokens back
    assert of_distance == [0, 1, 2, 3, 3, 4, 4, 5, 5, 5, 5]
    assert causal[11:].tolist() == [0] * 10  # what is ahead
    both_ways = relative_buckets(buckets=8, max_distance=6, bidirectional=True)
    assert both_ways.tolist() == [3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7, 7]


def position_bias(bidirectional: bool = False) -> RelativePositionBias:
    bias = RelativePositionBias(2, 6, 10, bidirectional)
    with torch.no_grad():
        bias.weight.copy_(torch.arange(12.0).view(6, 2) / 10)
    return bias


def test_position_bias_depends_on_the_distance_alone() -> None:
    found = position_bias()(torch.arange(3)[None], causal_mask(3))
    assert found.shape == (1, 2, 3, 3)
    no = -torch.inf
    close(found[0, 0], torch.tensor([[0.0, no, no], [0.2, 0.0, no], [0.4, 0.2, 0.0]]))
    close(found[0, 1], found[0, 0] + 0.1)


def test_position_bias_of_a_step_is_a_row_of_the_whole_and_each_row_has_its_own_position() -> None:
    bias = position_bias()
    whole = bias(torch.arange(30)[None], causal_mask(30))
    positions = torch.tensor([3, 29, 0])
    step = bias(positions[:, None], padding_mask(positions + 1, 30))
    assert step.shape == (3, 2, 1, 30)
    close(step[:, :, 0], whole[0][:, positions].transpose(0, 1))


@pytest.mark.parametrize(
    ("buckets", "distance", "bidirectional"),
    [(3, 10, True), (2, 10, True), (1, 9, False), (8, 4, False)],
)
def test_buckets_that_cannot_be_told_apart_are_refused(
    buckets: int, distance: int, bidirectional: bool
) -> None:
    with pytest.raises(ValueError, match=f"distances up to {distance} into {buckets} buckets"):
        RelativePositionBias(2, buckets, distance, bidirectional)


def test_rms_norm_takes_no_mean_off() -> None:
    norm = RMSNorm(2, eps=0.5)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0]))
    # mean of squares 12.5, plus eps: 13
    close(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[3.0, 8.0]]) / math.sqrt(13))
    halved = norm.half()(torch.tensor([[3e4, 4e4]]))
    assert halved.dtype == torch.float16
    close(halved.float(), torch.tensor([[3.0, 8.0]]) / math.sqrt(12.5), atol=2e-3)


def test_an_output_may_scale_what_it_is_given() -> None:
    projection = nn.Linear(3, 5, bias=False)
    hidden = torch.randn(2, 3)
    close(ScaledOutput(projection, 0.25)(hidden), projection(hidden) / 4)


def test_unsmoothing_gives_the_probabilities_before_smoothing() -> None:
    probabilities = torch.tensor([[0.7, 0.3, 0.0], [0.05, 0.05, 0.9]])
    projection = nn.Linear(3, 3, bias=False)
    nn.init.eye_(projection.weight)
    output = UnsmoothedOutput(projection, smoothing=0.3)
    smoothed = 0.7 * probabilities + 0.3 / 3
    logits = output(smoothed.log())
    close(logits.softmax(dim=-1), probabilities, atol=6e-3)  # a trace is left to the third token
    close(logits[1], (0.7 * probabilities[1]).log(), atol=2e-4)


def test_unsmoothing_keeps_the_order_of_tokens_below_the_spread_mass() -> None:
    projection = nn.Linear(4, 4, bias=False)
    nn.init.eye_(projection.weight)
    output = UnsmoothedOutput(projection, smoothing=0.4)
    smoothed = torch.tensor([0.83, 0.1, 0.06, 0.01])  # the spread mass of each is 0.1
    logits = output(smoothed.log())
    # 0.005 log(1 + exp((q - 0.1) / 0.005)), by hand
    close(logits, torch.tensor([0.73, 3.4657e-3, 1.6771e-6, 7.6150e-11]).log(), atol=1e-3)
    assert output(torch.tensor([500.0, 0.0, -500.0, 0.0])).isfinite().all()


def test_unsmoothing_enlarges_rounding_by_no_more_than_its_softness() -> None:
    projection = nn.Linear(43, 43, bias=False)
    nn.init.eye_(projection.weight)
    output = UnsmoothedOutput(projection, smoothing=0.1)
    logits = torch.cat([torch.tensor([8.0]), torch.linspace(-2.0, 2.0, 42)]).double()
    moved = logits + 1e-6 * torch.linspace(-1.0, 1.0, 43).double()
    difference = (output.double()(moved) - output(logits)).abs().amax()
    assert float(difference.detach()) < 4e-5


def test_a_table_of_positions_that_no_memory_holds_is_not_begun() -> None:
    with pytest.raises(ValueError, match="16777216 positions of 1024 numbers"):
        SinusoidalPositions(2**24, 1024)
