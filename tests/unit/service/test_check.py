"""`seqserve check`: what it compares, that it can find a difference, and what it never does."""

from __future__ import annotations

import json
import math
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from model.loader import LoadedModel, load_model
from service.check import TOLERANCE, Difference, Finding, Report
from service.check import check as compare
from service.cli import app
from tests.builders import (
    make_m2m_model,
    make_marian_model,
    make_native_model,
    make_tutorial_model,
)

TEXTS = ["a b ab", "ba", "aab bba"]


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_marian_model(tmp_path_factory.mktemp("marian"))


@pytest.fixture
def reference() -> None:
    pytest.importorskip("transformers", reason="the reference is not installed")


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def by_name(report: Report) -> dict[str, Finding]:
    return {finding.what: finding for finding in report.findings}


# --- with the reference --------------------------------------------------------------------------


@pytest.mark.usefixtures("reference")
class TestComparison:
    def test_texts_are_compared_from_token_ids_to_answers(self, marian: Path) -> None:
        done = check(marian, *(part for text in TEXTS for part in ("--text", text)))
        assert done.exit_code == 0, done.output
        for what in ("source tokens", "target tokens", "encoder output", "logits", "greedy"):
            assert what in done.stdout
        assert f"{marian} (marian) equals transformers" in done.stdout

    def test_without_texts_ids_of_several_lengths_are(self, marian: Path) -> None:
        facts = json.loads(check(marian, "--json").stdout)
        assert facts["equal"]
        compared = {f["what"]: f["compared"] for f in facts["findings"]}
        assert compared == {"tokens": 0, "encoder output": 8, "logits": 8, "greedy tokens": 8}
        assert all(f["largest"] < TOLERANCE for f in facts["findings"] if f["bound"])

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("encoder.layers.0.feed_forward.expand.weight", {"encoder output", "logits"}),
            ("decoder.layers.0.feed_forward.expand.weight", {"logits"}),
        ],
    )
    def test_a_wrong_weight_is_found(self, name: str, wrong: set[str], marian: Path) -> None:
        model = load_model(marian, "cpu", packed=False)
        model.network.get_parameter(name).mul_(1.1)
        found = by_name(compare(model, []))
        assert wrong <= {what for what, finding in found.items() if finding.different}
        assert found["encoder output"].different == 8 * ("encoder output" in wrong)

    def test_a_weight_that_is_not_finite_is_found(self, marian: Path) -> None:
        model = load_model(marian, "cpu")
        model.network.get_parameter("encoder.layers.0.feed_forward.expand.bias")[0] = torch.nan
        found = by_name(compare(model, []))["encoder output"]
        assert (found.different, found.largest) == (8, None)
        assert "not finite" in found.note

    def test_a_wrong_tokenizer_is_found(self, marian: Path) -> None:
        class Wrong:
            def __init__(self, right: Any) -> None:
                self.right = right

            def __getattr__(self, name: str) -> Any:
                return getattr(self.right, name)

            def encode(self, texts: list[str], **options: Any) -> list[list[int]]:
                return [[*ids[:1], *ids] for ids in self.right.encode(texts, **options)]

        model = load_model(marian, "cpu")
        object.__setattr__(model, "source_tokenizer", Wrong(model.source_tokenizer))
        found = by_name(compare(model, TEXTS))
        assert found["source tokens"].different == 3
        assert found["source tokens"].note.startswith("input 0: token ")
        assert found["target tokens"].different == 0

    def test_a_difference_is_the_exit_status(
        self, marian: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wrong(*arguments: Any) -> LoadedModel:
            model = load_model(*arguments)
            model.network.get_parameter("output.projection.bias")[0] += 20
            return model

        monkeypatch.setattr("model.loader.load_model", wrong)
        done = check(marian)
        assert done.exit_code == 1
        assert "DIFFERS FROM transformers" in done.stdout
        assert "greedy tokens: input 0: token 0 is 0 here, " in done.stdout

    def test_what_the_reference_cannot_do_is_not_compared(self, tmp_path: Path) -> None:
        """This configuration names no decoder start, which the reference's `generate` needs."""
        found = by_name(compare(load_model(make_m2m_model(tmp_path), "cpu"), ["a b"]))
        assert found["source tokens"].compared == 1
        assert found["target tokens"].note == "the model has no default target language"
        assert found["greedy tokens"].compared == 0
        assert "decoder_start_token_id" in found["greedy tokens"].note

    @pytest.mark.parametrize("tokenizer_class", ["Own", "MarianTokenizer"])
    def test_no_code_of_the_directory_is_run_and_nothing_is_fetched(
        self, tokenizer_class: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory, marker = make_marian_model(tmp_path / "marian"), tmp_path / "was-run"
        code = f"open({str(marker)!r}, 'w').close()\nclass Own: pass\ndef generate(**_): pass\n"
        (directory / "own.py").write_text(code)
        (directory / "custom_generate").mkdir()
        (directory / "custom_generate" / "generate.py").write_text(code)
        settings = {"auto_map": {"AutoTokenizer": ["own.Own", None]}}
        settings |= {"tokenizer_class": tokenizer_class}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))

        def connect(*address: object) -> None:
            raise AssertionError(f"a connection to {address}")

        monkeypatch.setattr(socket.socket, "connect", connect)
        monkeypatch.setattr(socket, "getaddrinfo", connect)
        done = check(directory, "--text", "a b")
        assert done.exit_code == 0, done.output
        assert not marker.exists()
        if tokenizer_class == "Own":
            assert "tokens: transformers has no Own" in done.stdout

    def test_another_tokenizer_than_the_stated_one_is_not_compared(self, tmp_path: Path) -> None:
        """For a SMaLL-100, whose class lies beside it as code, it would take M2M100's."""
        settings = {"tokenizer_class": "SMALL100Tokenizer", "tgt_lang": "en"}
        report = compare(load_model(make_m2m_model(tmp_path, **settings), "cpu"), ["a b"])
        assert by_name(report)["tokens"].note == "transformers has no SMALL100Tokenizer"
        assert report.equal

    @pytest.mark.parametrize("make", [make_native_model, make_tutorial_model])
    def test_a_family_of_our_own_has_no_reference(
        self, make: Callable[[Path], Path], tmp_path: Path
    ) -> None:
        done = check(make(tmp_path))
        assert done.exit_code == 2
        assert "transformers does not know the family" in done.stderr

    def test_a_text_that_is_too_long_is_refused(self, marian: Path) -> None:
        done = check(marian, "--text", "a", "--text", "ab " * 60)
        assert done.exit_code == 2
        assert "text 1 must have 1 to 40 tokens, got " in done.stderr


# --- without it ----------------------------------------------------------------------------------


def test_the_missing_package_is_named(marian: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = check(marian)
    assert done.exit_code == 2
    assert "transformers is not installed" in done.stderr
    assert "Traceback" not in done.output


def test_differences_count_in_proportion_to_the_values() -> None:
    small = Difference.between(torch.tensor([0.5, 0.0]), torch.tensor([0.5, 9e-5]))
    assert small.largest == pytest.approx(9e-5)
    assert small.bound == TOLERANCE
    large = Difference.between(torch.tensor([0.0, -9.0]), torch.tensor([2e-4, -9.0]))
    assert large.bound == pytest.approx(9 * TOLERANCE)
    numbers = Finding.of_numbers("logits", [small, large])
    assert (numbers.different, numbers.bound) == (0, large.bound)
    assert Finding.of_numbers("logits", [small, Difference(2e-4, TOLERANCE)]).different == 1


def test_infinities_may_be_equal_and_nothing_equals_what_is_no_number() -> None:
    infinite, finite = torch.tensor([-math.inf, 1.0]), torch.tensor([0.0, 1.0])
    nothing = torch.tensor([math.nan, 1.0])
    assert Difference.between(infinite, infinite).largest == 0
    for ours, theirs in ((finite, infinite), (infinite, finite), (nothing, nothing)):
        found = Difference.between(ours, theirs)
        assert not found.within(found.bound)
