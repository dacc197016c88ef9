"""The languages of a multilingual model, and where their tokens go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from model.config import ModelSpec

Start = Literal["first", "start", "none"]


@dataclass(frozen=True)
class Languages:
    """Codes, their tokens, and the places of these.

    Attributes:
        ids: code -> id of its token, in the order of ids.
        eos_id: `</s>`.
        before: a source is `code text </s>`; otherwise `text </s> code`.
        source_names: the language that a source's token names, its own or the target's.
        target: how the decoder learns of its language: the token is the first one behind the
            decoder start, or is the decoder start, or is not told to the decoder at all.
        default_src, default_tgt: where a request names none; None where it has to.
        aliases: other names of codes.
        written: how a text may name its target by itself, at its beginning (Marian's `>>fra<<`).
            Then requests need not name one, and the sources' language is none of theirs.
    """

    ids: Mapping[str, int]
    eos_id: int
    before: bool
    source_names: Literal["src_lang", "tgt_lang"] = "src_lang"
    target: Start = "first"
    default_src: str | None = None
    default_tgt: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    written: re.Pattern[str] | None = None

    def find(self, name: str) -> int | None:
        """The id of a language's token; None where there is no such language."""
        return self.ids.get(self.aliases.get(name, name))

    def code(self, id: int | None) -> str | None:
        """The language that a token names, if it names one."""
        return next((code for code, its in self.ids.items() if its == id), None)

    def around(self, id: int | None) -> tuple[list[int], list[int]]:
        """What belongs before a source text and behind it; None where no token does."""
        if id is None:
            return [], [self.eos_id]
        return ([id], [self.eos_id]) if self.before else ([], [self.eos_id, id])

    def known_to(self, spec: ModelSpec) -> Languages:
        """With what a model's configuration says of the language it speaks."""
        if self.target == "none":
            return self
        starting = self.code(spec.decoder_start_ids[-1] if spec.decoder_start_ids else None)
        if starting:  # as in mBART: that token is the language
            return replace(self, target="start", default_tgt=starting)
        forced = self.code(spec.defaults.forced_bos_token_id)
        return replace(self, default_tgt=forced or self.default_tgt)


def codes_among(tokens: Iterable[tuple[str, int]], pattern: re.Pattern[str]) -> dict[str, int]:
    """Code -> id of the tokens that look like one, in the order of ids.

    Args:
        pattern: of a whole token; its first group, if it has one, is the code.
    """
    found = {}
    for token, id in sorted(tokens, key=lambda pair: pair[1]):
        if match := pattern.fullmatch(token):
            found[match[pattern.groups and 1]] = id
    return found
