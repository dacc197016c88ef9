"""API keys: who may ask.

Keys are kept as hashes only, so that no dump of an object can show one.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256

from pydantic import SecretStr

from seqserve.errors import UnauthorizedError
from service.settings import Settings

PLAIN = re.compile(r"[\x21-\x7e]+")
"""What fits into a header: printable ASCII without spaces."""

BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)


class ApiKeys:
    """The keys that a server accepts; without any, it accepts everybody."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, headers: Mapping[str, str]) -> None:
        """Return if a request may be answered.

        Raises:
            UnauthorizedError: it has no key, or a wrong one.
        """
        if not self._digests:
            return
        given = _given(headers)
        if not given:
            raise UnauthorizedError(
                "an API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        if not sum(self._known(key) for key in given):
            raise UnauthorizedError("the API key is not one of this server's")

    def sent(self, headers: Mapping[str, str]) -> bool:
        """Whether a request has a key, right or wrong, where one belongs."""
        return bool(_given(headers))

    def check_key(self, key: str | None) -> None:
        """Return if a request with this key in its body may be answered.

        Raises:
            UnauthorizedError: it is none, or a wrong one.
        """
        if not self._digests:
            return
        if not key:
            raise UnauthorizedError("an API key is needed: send it as api_key")
        if not self._known(key):
            raise UnauthorizedError("the API key is not one of this server's")

    def _known(self, key: str) -> bool:
        """Takes as long for any key: all are compared, in full, whatever the first ones give."""
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, own) for own in self._digests) > 0


def _given(headers: Mapping[str, str]) -> list[str]:
    bearer = BEARER.fullmatch(headers.get("authorization", ""))
    return [key for key in (bearer[1] if bearer else "", headers.get("x-api-key", "")) if key]


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def read_keys(settings: Settings) -> ApiKeys:
    """The keys of the settings and of the file that they name.

    Raises:
        ValueError: the file cannot be read, a key would not fit into a header, or there is none
            although some were promised. No message holds a key.
    """
    keys: list[str] = []
    if settings.api_keys is not None:
        keys += _split(settings.api_keys)
    if settings.api_keys_file is not None:
        try:
            text = settings.api_keys_file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise ValueError(f"api_keys_file {settings.api_keys_file}: {reason}") from None
        keys += _lines(text, f"api_keys_file {settings.api_keys_file}")
    return ApiKeys(keys)


def _split(value: SecretStr) -> list[str]:
    keys = [key.strip() for key in value.get_secret_value().split(",") if key.strip()]
    for number, key in enumerate(keys, start=1):
        _check(key, f"api_keys: key {number}")
    return _not_none(keys, "api_keys")


def _lines(text: str, place: str) -> list[str]:
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if key and not key.startswith("#"):
            _check(key, f"{place}: line {number}")
            keys.append(key)
    return _not_none(keys, place)


def _check(key: str, place: str) -> None:
    if not PLAIN.fullmatch(key):
        raise ValueError(f"{place} must be printable ASCII without spaces")


def _not_none(keys: list[str], place: str) -> list[str]:
    if not keys:  # serving everybody is not what was asked for
        raise ValueError(f"{place} has no key in it")
    return keys
