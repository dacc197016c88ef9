"""The calls in docs/models.md, on small random models with real tokenizer files, over a socket."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from service.check import cut
from tests.parity import tokenizer_files as files
from tests.parity.families import reference_model

from .conftest import PATIENCE, ROOT, Server, serving

pytest.importorskip("transformers", reason="the reference is not installed")

DOCS = (ROOT / "docs" / "models.md").read_text()


@dataclass(frozen=True)
class Published:
    """How a small model is made that is like a published one.

    Attributes:
        shape: of its network, in `tests.parity.families`.
        tokenizer: writes its files.
        tells: how the model is told the target's language.
    """

    shape: str
    tokenizer: Callable[[Path, Path], Any]
    tells: Literal["nothing", "decoder start", "first token", "source"] = "nothing"


PUBLISHED = {
    "bart-large-cnn": Published("bart", files.bart),
    "mbart-large-en-ro": Published("mbart", files.mbart, "decoder start"),
    "mbart-large-50-many-to-many-mmt": Published("mbart", files.mbart50, "first token"),
    "opus-mt-en-de": Published("opus", files.marian),
    "m2m100_418M": Published("m2m_100", files.m2m100, "first token"),
    "nllb-200-distilled-600M": Published("m2m_100", files.nllb, "first token"),
    "small100": Published("m2m_100", files.small100, "source"),
    "pegasus-xsum": Published("pegasus", files.pegasus),
    "t5-small": Published("t5", files.t5),
    "flan-t5-small": Published("t5-v1.1", files.t5),
    "mt5-small": Published("mt5", files.t5),
    "byt5-small": Published("byt5", files.byt5),
}


@dataclass(frozen=True)
class Call:
    """A documented call and the model that it is for."""

    model: str
    command: str


def documented_calls(text: str) -> list[Call]:
    """Each `curl` with the model of the `seqserve serve` above it."""
    calls, model = [], ""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            if found := re.fullmatch(r"seqserve serve --model (\S+)", line):
                model = found[1]
            elif line.startswith("curl") and model:
                calls.append(Call(model, line))
    return calls


CALLS = documented_calls(DOCS)


@dataclass(frozen=True)
class Reference:
    """A model as `transformers` has it."""

    published: Published
    tokenizer: Any
    network: Any

    @torch.no_grad()
    def answer(self, text: str, parameters: dict[str, Any]) -> list[int]:
        """The tokens behind the decoder start, `</s>` included."""
        asked = dict(parameters)
        src, tgt = asked.pop("src_lang", None), asked.pop("tgt_lang", None)
        if self.published.tells == "source":
            src = tgt
        if src is not None:
            self.tokenizer.src_lang = src
        if self.published.tells == "first token":
            asked["forced_bos_token_id"] = self._language(tgt)
        if self.published.tells == "decoder start":
            asked["decoder_start_token_id"] = self._language(tgt)
        ids = self.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        [answer] = self.network.generate(**ids, **asked).tolist()
        return cut(answer[1:], {self.network.config.eos_token_id})

    def _language(self, code: str) -> int:
        of_m2m = hasattr(self.tokenizer, "get_lang_id")
        id: int = self.tokenizer.convert_tokens_to_ids(f"__{code}__" if of_m2m else code)
        return id


def publish(directory: Path, published: Published, pieces: Path) -> Reference:
    """Write a model's directory."""
    tokenizer = published.tokenizer(directory, pieces)
    vocab = len(tokenizer.get_vocab())
    options: dict[str, Any] = {}
    if published.shape == "m2m_100":
        vocab += 108  # languages stand behind M2M100's vocabulary
        options["decoder_start_token_id"] = tokenizer.eos_token_id
    if published.shape == "mbart":
        start = "ro_RO" if published.tells == "decoder start" else "</s>"
        options["decoder_start_token_id"] = tokenizer.convert_tokens_to_ids(start)
    if published.shape == "opus":
        pad = tokenizer.pad_token_id
        options |= {"pad_token_id": pad, "decoder_start_token_id": pad}
    network = reference_model(published.shape, vocab_size=vocab, **options)
    network.generation_config.max_new_tokens = 12
    if published.shape == "opus":  # as OPUS-MT asks by default
        network.generation_config.num_beams = 4
        network.generation_config.bad_words_ids = [[pad]]
    network.save_pretrained(directory)
    return Reference(published, tokenizer, network)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    """Every model's directory, called like the model, and what the reference makes of it."""
    root = tmp_path_factory.mktemp("published")
    pieces = files.write_pieces(root / "sentencepiece.bpe.model")
    return {
        name: (root / name, publish(root / name, published, pieces))
        for name, published in PUBLISHED.items()
    }


@pytest.fixture(scope="module")
def server(references: dict[str, tuple[Path, Reference]]) -> Iterator[Server]:
    """One that serves them all."""
    models = [part for path, _ in references.values() for part in ("--model", str(path))]
    with serving(*models) as running:
        yield running


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.model)
def test_a_documented_call_gives_the_reference_s_tokens(
    call: Call, server: Server, references: dict[str, tuple[Path, Reference]]
) -> None:
    *command, body = shlex.split(call.command)
    asked = json.loads(body)
    parameters = asked.get("parameters", {})
    expected = references[call.model][1].answer(asked["inputs"], parameters)
    asked |= {"model": call.model, "parameters": {**parameters, "details": True}}
    url = server.url.removeprefix("http://")
    command = [part.replace("localhost:8000", url) for part in command]
    done = subprocess.run(
        [*command, json.dumps(asked), "--silent", "--show-error"],
        capture_output=True,
        check=True,
        timeout=PATIENCE,
    )
    answer = json.loads(done.stdout)
    assert "details" in answer, answer
    assert [token["id"] for token in answer["details"]["tokens"]] == expected
    assert len(expected) > 1


def test_every_family_has_a_call() -> None:
    assert {call.model for call in CALLS} == PUBLISHED.keys()
