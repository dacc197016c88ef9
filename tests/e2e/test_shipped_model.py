"""The shipped model and the README's first screen, through a real server."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model.evaluation import evaluate, translate
from model.files import SUMS, check_sums
from model.loader import LoadedModel, load_model
from model.training import read_pairs
from seqserve import Client
from service.hub import FILES

from .conftest import ROOT, Server, serving

WEIGHTS = ROOT / "weights" / "g2p-en"
README = (ROOT / "README.md").read_text()

KNOWN = {
    "hello": {"HH AH L OW", "HH EH L OW"},
    "world": {"W ER L D"},
    "computer": {"K AH M P Y UW T ER"},
    "elephant": {"EH L AH F AH N T"},
    "thinking": {"TH IH NG K IH NG"},
    "Phone": {"F OW N"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(WEIGHTS, "cpu")


def test_it_pronounces_words_as_people_do(server: Server) -> None:
    with Client(server.url) as client:
        for word, accepted in KNOWN.items():
            assert client.generate(word).generated_text in accepted


def test_64_callers_get_what_each_would_get_alone_in_shared_steps(server: Server) -> None:
    words = [source for source, _ in read_pairs(WEIGHTS / "dev-sample.tsv")][:64]
    with Client(server.url) as client:
        alone = [client.generate(word).generated_text for word in words]
        with ThreadPoolExecutor(64) as callers:
            together = list(callers.map(lambda w: client.generate(w).generated_text, words))
        assert together == alone
        batches = client.info().models[0].batches
    assert batches is not None
    print(f"rows per step: {batches.histogram}")
    assert batches.max_rows > 8


def test_the_figures_on_300_held_out_words_are_the_card_s(model: LoadedModel) -> None:
    figures = evaluate(model, read_pairs(WEIGHTS / "dev-sample.tsv"))
    expected = json.loads((WEIGHTS / "training.json").read_text())["dev_sample"]
    assert figures.sources == 300
    assert abs(figures.error_rate - expected["error_rate"]) < 0.01
    assert abs(figures.token_error_rate - expected["token_error_rate"]) < 0.005
    assert abs(figures.calibration_error - expected["calibration_error"]) < 0.02
    assert 0.15 < figures.error_rate < 0.28


def test_answers_are_neither_empty_nor_endless(model: LoadedModel) -> None:
    words = [source for source, _ in read_pairs(WEIGHTS / "dev-sample.tsv")]
    odd = ["a", "x", "'s", "a" * 20, "zzzzzzzz", "bcdfghjklm", "aeiouaeiou", "o'o'o'o"]
    for word, answer in zip(words + odd, translate(model, words + odd), strict=True):
        phonemes = answer.text.split()
        assert 1 <= len(phonemes) < model.spec.default_max_new_tokens, word


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("O’Brien", "o'brien"),
        ("‘tis", "'tis"),
        ("Zoë", "zoe"),
        ("façade", "facade"),
        ("McDONALD", "mcdonald"),
        ("Jean‑Luc", "jeanluc"),
        ("co-op", "coop"),
        ("New York", "newyork"),
    ],
)
def test_words_as_people_write_them_have_no_unknown_letter(
    server: Server, written: str, read: str
) -> None:
    with Client(server.url) as client:
        answers = client.generate([written, read], {"details": True})
    assert answers[0].details
    assert answers[0].details.unknown_tokens == 0
    assert answers[0].generated_text == answers[1].generated_text


def test_several_words_at_once_are_each_answered_as_alone(server: Server) -> None:
    words = ["Zoë", "co-op", "don't", "Elizabeth", "rhythm"]
    with Client(server.url) as client:
        alone = [client.generate(word).generated_text for word in words]
        assert [answer.generated_text for answer in client.generate(words)] == alone
    assert len(set(alone)) == len(words)


def test_a_word_longer_than_any_in_training_is_refused_with_both_counts(server: Server) -> None:
    word = "a" * 40
    answer = subprocess.run(
        ["curl", "-s", f"{server.url}/generate", "-d", json.dumps({"inputs": word})],
        capture_output=True,
        check=True,
        timeout=30,
    )
    message = json.loads(answer.stdout)["error"]
    assert re.search(r"inputs has 41 tokens, the model takes at most \d+", message)


def test_unknown_characters_are_counted(server: Server) -> None:
    with Client(server.url) as client:
        details = client.generate("na7ïve", {"details": True}).details
    assert details
    assert details.unknown_tokens == 1  # the digit; ï is folded to i


def test_the_files_are_those_of_the_card() -> None:
    """Others than these are refused, see `model.files.check_sums`; here, that none is left out."""
    listed = {line[66:] for line in (WEIGHTS / SUMS).read_text().splitlines()}
    read = {f.name for f in WEIGHTS.iterdir()} & {*FILES, "model.safetensors"}
    assert listed == read, "run make checksums"
    check_sums(WEIGHTS)
    assert sum(f.stat().st_size for f in WEIGHTS.iterdir()) < 30_000_000
    assert "Carnegie Mellon University" in (WEIGHTS / "LICENSE").read_text()


def test_the_readme_s_call_gives_the_readme_s_answer(server: Server) -> None:
    found = re.search(r"^\$ (curl .*?)\n(\{.*?\})$", README, re.MULTILINE)
    assert found
    command = found[1].replace("localhost:8000", server.url.removeprefix("http://"))
    answer = subprocess.run(shlex.split(command), capture_output=True, check=True, timeout=30)
    assert json.loads(answer.stdout) == json.loads(found[2])


def test_the_readme_s_python_runs(server: Server, tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found
    script = tmp_path / "readme.py"
    script.write_text(found[1].replace("http://127.0.0.1:8000", server.url))
    answer = subprocess.run(
        [sys.executable, str(script)], capture_output=True, check=True, timeout=60, text=True
    )
    assert answer.stdout.splitlines()[0] in KNOWN["hello"]
