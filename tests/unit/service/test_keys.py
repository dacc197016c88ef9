"""API keys: where they come from, which requests they let in, and that they show nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from seqserve.errors import UnauthorizedError
from service.keys import ApiKeys, read_keys
from service.settings import Settings

KEY, OTHER = "sk-first", "sk-second"


def test_without_keys_everybody_may_ask() -> None:
    read_keys(Settings()).check({})


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {OTHER} "},
        {"x-api-key": OTHER},
        {"x-api-key": KEY, "authorization": "Basic eDp5"},
        {"x-api-key": "wrong", "authorization": f"Bearer {KEY}"},
    ],
)
def test_any_of_the_keys_lets_in_either_way(headers: dict[str, str]) -> None:
    ApiKeys([KEY, OTHER]).check(headers)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "an API key is needed"),
        ({"authorization": ""}, "an API key is needed"),
        ({"authorization": f"Basic {KEY}"}, "an API key is needed"),
        ({"authorization": KEY}, "an API key is needed"),
        ({"x-api-key": ""}, "an API key is needed"),
        ({"authorization": f"Bearer {KEY}x"}, "not one of this server's"),
        ({"x-api-key": KEY[:-1]}, "not one of this server's"),
        ({"x-api-key": f"{KEY},{OTHER}"}, "not one of this server's"),
        ({"x-api-key": "caf\u00e9"}, "not one of this server's"),
    ],
)
def test_none_or_a_wrong_one_is_refused_and_not_repeated(
    headers: dict[str, str], message: str
) -> None:
    with pytest.raises(UnauthorizedError, match=message) as caught:
        ApiKeys([KEY, OTHER]).check(headers)
    assert KEY not in str(caught.value)


def test_every_key_is_compared_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(given: bytes, own: bytes) -> bool:
        compared.append((len(given), len(own)))
        return given == own

    monkeypatch.setattr("service.keys.hmac.compare_digest", compare)
    keys = ApiKeys([KEY, OTHER, "third"])
    keys.check({"x-api-key": KEY})
    with pytest.raises(UnauthorizedError):
        keys.check({"x-api-key": "x"})
    assert compared == [(32, 32)] * 6


def test_keys_come_from_the_variable_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n{OTHER}\r\n  third  \n")
    monkeypatch.setenv("SEQSERVE_API_KEYS", f"{KEY}, fourth")
    keys = read_keys(Settings(api_keys_file=file))
    assert len(keys) == 4
    for key in (KEY, OTHER, "third", "fourth"):
        keys.check({"x-api-key": key})


def test_keys_show_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_API_KEYS", KEY)
    settings = Settings()
    for text in (
        repr(settings),
        str(settings.model_dump()),
        settings.model_dump_json(),
        repr(vars(read_keys(settings))),
    ):
        assert KEY not in text
    with pytest.raises(ValidationError) as caught:
        Settings(port=-1)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no key in it"),
        (b"# only words\n", "has no key in it"),
        (b"good\nnot good\n", "line 2 must be printable ASCII without spaces"),
        ("caf\u00e9".encode(), "line 1 must be"),
        (b"\xff", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_promises_keys_must_have_some(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_keys(Settings(api_keys_file=file))
    assert f"api_keys_file {file}" in str(caught.value)
    assert "good" not in str(caught.value)


@pytest.mark.parametrize("value", [",", " ", "a b"])
def test_a_variable_that_promises_keys_must_have_some(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SEQSERVE_API_KEYS", value)
    with pytest.raises(ValueError, match="api_keys") as caught:
        read_keys(Settings())
    assert "a b" not in str(caught.value)
