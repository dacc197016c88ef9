"""What every shape of every family is held to: the reference's numbers and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.loader import load_model
from service.check import Both, our_logits, reference_logits
from tests.parity.checkpoints import ATOL, check_generation, check_long_targets, largest_difference
from tests.parity.families import FAMILIES, FAMILY_OF, make

pytest.importorskip("transformers", reason="the reference is not installed")


@pytest.mark.parametrize("name", FAMILY_OF)
def test_encoder_output_and_logits_equal_the_reference(name: str, tmp_path: Path) -> None:
    difference = largest_difference(make(tmp_path, name))
    print(f"{name}: {difference:.1e}")
    assert difference < ATOL


@pytest.mark.parametrize("name", FAMILY_OF)
def test_greedy_and_beam_tokens_equal_the_reference(name: str, tmp_path: Path) -> None:
    check_generation(make(tmp_path, name))


@pytest.mark.parametrize("name", [name for family in FAMILIES for name in family.long])
def test_cached_steps_equal_the_full_pass_beyond_64_positions(name: str, tmp_path: Path) -> None:
    check_long_targets(make(tmp_path, name))


@pytest.mark.parametrize("name", [name for family in FAMILIES for name in family.rounded])
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    family, exact = FAMILY_OF[name], make(tmp_path, name)
    rounded = Both(exact.reference, load_model(tmp_path, "cpu", "bfloat16"))
    pairs = list(zip(exact.sources(8), exact.targets(8), strict=True))
    for (src, tgt), found in zip(pairs, our_logits(rounded, pairs), strict=True):
        difference = (found - reference_logits(exact, src, tgt)).abs()
        assert difference.mean() < family.mean
        assert difference.max() < family.most  # of logits that spread over about 12
