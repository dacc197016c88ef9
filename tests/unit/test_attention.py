"""Attention against numbers worked out by hand, against torch's own, and in any company."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import (
    MultiHeadAttention,
    attention,
    attention_weights,
    causal_mask,
    mask_bias,
    padding_mask,
)
from model.layers import Dropout


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(found: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-5)


def test_attention_equals_a_hand_computed_example() -> None:
    query = torch.tensor([[[[1.0, 0.0]]]])
    key = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    value = torch.tensor([[[[10.0, 0.0], [0.0, 20.0]]]])
    # Scores 1/sqrt(2) and 0; softmax e^0.7071 / (e^0.7071 + 1) = 0.66976.
    first = math.exp(1 / math.sqrt(2)) / (math.exp(1 / math.sqrt(2)) + 1)
    close(attention_weights(query, key), torch.tensor([[[[first, 1 - first]]]]))
    close(attention(query, key, value), torch.tensor([[[[10 * first, 20 * (1 - first)]]]]))


def test_attention_weights_sum_to_one() -> None:
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8)
    mask = torch.rand(2, 1, 4, 6) > 0.4
    mask[..., 0] = True
    for chosen in (None, mask):
        weights = attention_weights(query, key, chosen)
        assert weights.min() >= 0
        close(weights.sum(-1), torch.ones(2, 3, 4))


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("kind", ["none", "boolean", "numbers"])
@pytest.mark.parametrize("queries", [1, 4])
def test_all_ways_to_attend_agree(queries: int, kind: str, scale: float | None) -> None:
    query, key, value = (torch.randn(2, 3, n, 8) for n in (queries, 6, 6))
    allowed = torch.rand(2, 1, queries, 6) > 0.5
    allowed[..., 2] = True
    bias = mask_bias(allowed, torch.float32) + torch.randn(2, 3, queries, 6)
    mask = {"none": None, "boolean": allowed, "numbers": bias}[kind]
    spelled_out = attention_weights(query, key, mask, scale) @ value
    close(attention(query, key, value, mask, scale=scale), spelled_out)
    reference = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    close(attention(query, key, value, mask, scale=scale), reference)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_row_attends_alike_beside_few_and_many_and_in_any_cache(queries: int) -> None:
    store = torch.randn(2, 33, 8, 40, 64)  # longer than what is attended to
    query, keys, values = torch.randn(33, queries, 8, 64).transpose(1, 2), *store
    mask = mask_bias(padding_mask(torch.arange(33) % 20 + 1, 24), torch.float32)
    together = attention(query, keys[:, :, :24], values[:, :, :24], mask)
    for rows in (1, 2, 7, 16):
        chosen = slice(rows)
        alone = attention(query[chosen], *(t[chosen, :, :24] for t in store), mask[chosen])
        assert torch.equal(alone, together[chosen])


@pytest.mark.parametrize("queries", [1, 4, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_any_key_yields_zeros(queries: int, dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 2, n, 16, dtype=dtype) for n in (queries, 6, 6))
    mask = torch.ones(2, 1, queries, 6, dtype=torch.bool)
    mask[1] = False
    assert not attention_weights(query, key, mask)[1].any()
    found = attention(query, key, value, mask)
    assert not found[1].any()
    assert found[0].isfinite().all()
    assert found[0].any()


def test_training_dropout_keeps_a_row_without_any_key_zero_and_its_gradient_finite() -> None:
    query, key, value = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    found = attention(query, key, value, mask, Dropout(0.5).train())
    assert not found.any()
    found.sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_causal_mask_allows_the_past_and_the_present() -> None:
    assert causal_mask(3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_padding_mask_allows_keys_before_each_length() -> None:
    mask = padding_mask(torch.tensor([2, 0, 3]), 3)
    assert mask.shape == (3, 1, 1, 3)
    assert mask[:, 0, 0].int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]


def test_a_mask_as_numbers_to_add_attends_to_the_same() -> None:
    mask = padding_mask(torch.tensor([3, 0]), 5)
    bias = mask_bias(mask, torch.float32)
    assert bias[:, 0, 0].tolist() == [[0.0] * 3 + [-math.inf] * 2, [-math.inf] * 5]
    query, key, value = (torch.randn(2, 3, length, 4) for length in (2, 5, 5))
    assert torch.equal(attention(query, key, value, bias), attention(query, key, value, mask))
    weights = [attention_weights(query, key, m) for m in (bias, mask)]
    assert torch.equal(*weights)


def test_masked_keys_have_no_influence() -> None:
    query, key, value = (torch.randn(2, 2, n, 4) for n in (3, 5, 5))
    mask = padding_mask(torch.tensor([3, 5]), 5)
    before = attention(query, key, value, mask)
    key[0, :, 3:], value[0, :, 3:] = 100.0, -100.0
    assert torch.equal(attention(query, key, value, mask), before)
    key[0, :, 2:] += 1.0  # a key that the mask shows does matter
    assert not torch.equal(attention(query, key, value, mask)[0], before[0])


def torch_attention(ours: MultiHeadAttention, dim: int, bias: bool) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(dim, ours.heads, bias=bias, batch_first=True)
    with torch.no_grad():
        parts = (ours.query, ours.key, ours.value)
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
            theirs.out_proj.bias.copy_(ours.output.bias)
    return theirs


@pytest.mark.parametrize("bias", [True, False])
def test_multi_head_attention_equals_torchs_own(bias: bool) -> None:
    ours = MultiHeadAttention(12, 3, bias=bias)
    theirs = torch_attention(ours, 12, bias)
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    lengths = torch.tensor([4, 7])
    with torch.no_grad():
        # self
        found = ours(*ours.queries_keys_values(x), None)
        close(found, theirs(x, x, x, need_weights=False)[0], atol=1e-5)
        # masked self
        found = ours(*ours.queries_keys_values(x), causal_mask(5))
        expected = theirs(x, x, x, attn_mask=~causal_mask(5), need_weights=False)[0]
        close(found, expected, atol=1e-5)
        # cross, with another length and padding
        mask = padding_mask(lengths, 7)
        found = ours(ours.queries(x), *ours.keys_values(memory), mask)
        hidden = ~mask[:, 0, 0]
        expected = theirs(x, memory, memory, key_padding_mask=hidden, need_weights=False)[0]
        close(found, expected, atol=1e-5)


def test_one_head_of_identity_projections_is_plain_attention() -> None:
    layer = MultiHeadAttention(2, 1, bias=False)
    with torch.no_grad():
        for part in (layer.query, layer.key, layer.value, layer.output):
            part.weight.copy_(torch.eye(2))
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    first = math.exp(1 / math.sqrt(2)) / (math.exp(1 / math.sqrt(2)) + 1)
    close(layer(*layer.queries_keys_values(x), None)[0, 0], torch.tensor([first, 1 - first]))


@pytest.mark.parametrize(("dim", "heads"), [(10, 3), (10, 0), (10, -2), (2, 4)])
def test_width_must_be_a_multiple_of_heads(dim: int, heads: int) -> None:
    with pytest.raises(ValueError, match=f"dim {dim} and heads {heads}"):
        MultiHeadAttention(dim, heads)


def test_both_ways_to_attend_agree_on_a_bias_and_a_scale() -> None:
    query, key, value = (torch.randn(2, 2, 5, 4) for _ in range(3))
    mask = padding_mask(torch.tensor([5, 0]), 5) & causal_mask(5)
    bias = torch.randn(1, 2, 5, 5).masked_fill(~mask, -torch.inf)
    weights = attention_weights(query, key, bias, scale=1.0)
    close(attention(query, key, value, bias, scale=1.0), weights @ value)
    assert not weights[1].any()  # a row without any key
    by_hand = ((query @ key.mT)[0] + bias[0]).softmax(dim=-1)
    close(weights[0], by_hand)


def test_heads_may_have_a_width_of_their_own() -> None:
    layer = MultiHeadAttention(6, 4, bias=False, head_dim=5, scale=1.0)
    x = torch.randn(2, 3, 6)
    queries, keys, values = layer.queries_keys_values(x)
    assert keys.shape == (2, 4, 3, 5)
    assert layer(queries, keys, values, None).shape == x.shape
    weights = layer.weights(queries, keys, None)
    close(layer.merge(weights @ values), layer(queries, keys, values, None))


@pytest.mark.parametrize("bias", [True, False])
def test_joined_projections_are_the_three_in_one(bias: bool) -> None:
    layer = MultiHeadAttention(6, 4, bias=bias, head_dim=5)
    x = torch.randn(2, 3, 6)
    with torch.no_grad():
        expected = layer.queries_keys_values(x)
        layer.join_projections()
        found = layer.queries_keys_values(x)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 6 * 20 + bias * (3 * 20 + 6)
