"""LibreTranslate's own Python client, as it is, against a live server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
from libretranslatepy import LibreTranslateAPI

from seqserve import Client

from .conftest import Server, serving

KEY = "sk-one"


@pytest.fixture(scope="module")
def translating(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key and a model for a pair."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    arguments = ("--model", f"tiny={model}", "--pair", "en-es=tiny", "--api-keys-file", str(keys))
    with serving(*arguments) as server:
        yield server


def test_its_client_works_as_it_is(translating: Server) -> None:
    client = LibreTranslateAPI(translating.url, api_key=KEY)
    assert client.languages() == [{"code": "en", "name": "English", "targets": ["es"]}]
    with Client(translating.url, api_key=KEY) as ours:
        sentences = [answer.generated_text for answer in ours.generate(["cat", "left ear"])]
    assert all(sentences)
    assert client.translate("cat") == sentences[0]
    text = client.translate("cat\n\n  left ear\n", source="en", target="es", timeout=60)
    assert text == f"{sentences[0]}\n\n  {sentences[1]}\n"


def refusal(client: LibreTranslateAPI, method: str, **languages: str) -> tuple[int, str]:
    """Status and message of what the client raises."""
    with pytest.raises(HTTPError) as caught:
        getattr(client, method)("cat", **languages)
    with caught.value as error:
        return error.code, json.loads(error.read())["error"]


def test_its_client_raises_what_is_refused(translating: Server) -> None:
    client = LibreTranslateAPI(translating.url, api_key=KEY)
    status, message = refusal(client, "translate", target="fr")
    assert (status, "target must be a language" in message) == (400, True)
    status, message = refusal(client, "detect")
    assert (status, "does not detect languages" in message) == (400, True)
    for key in ("sk-wrong", None):
        status, message = refusal(LibreTranslateAPI(translating.url, api_key=key), "translate")
        assert (status, "API key" in message) == (403, True)
