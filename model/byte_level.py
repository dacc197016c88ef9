"""Byte-level BPE in two files, `vocab.json` and `merges.txt`: BART's, CodeT5's."""

from __future__ import annotations

from pathlib import Path

import tokenizers as backends
from tokenizers import decoders, models, pre_tokenizers, processors

from model.checkpoint import ModelError
from model.multilingual import added_tokens, read_settings
from model.pretrained import Options
from model.tokenizer import BOS, EOS, PAD, UNK, AddedTokens, JsonTokenizer


def byte_level(vocab: Path, merges: Path) -> JsonTokenizer:
    """The tokenizer of such files, which frames a text as `<s> ... </s>`.

    Raises:
        ValueError: the files hold something else.
        ModelError: tokens that were added later are to have other ids than they can have, or
            `tokenizer_config.json` holds something else.
    """
    try:
        backend = backends.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{vocab}: not a byte-level vocabulary: {error}") from error
    special = [token for token in (BOS, PAD, EOS, UNK) if backend.token_to_id(token) is not None]
    backend.add_special_tokens([*special, backends.AddedToken("<mask>", lstrip=True)])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=_leading_space(vocab.parent))
    backend.decoder = decoders.ByteLevel()
    _add(backend, added_tokens(vocab.parent, backend.get_vocab()))
    ids = {token: backend.token_to_id(token) for token in (BOS, EOS)}
    if None in ids.values():
        raise ValueError(f"{vocab}: {BOS} and {EOS} must be in the vocabulary")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=list(ids.items())
    )
    return JsonTokenizer(backend)


def _leading_space(directory: Path) -> bool:
    """Whether a text's first word is cut like those behind a space: some models learned it so.

    Raises:
        ModelError: `add_prefix_space` is neither true nor false.
    """
    source = str(directory / "tokenizer_config.json")
    return bool(Options(read_settings(directory), source).flag("add_prefix_space", False))


def _add(backend: backends.Tokenizer, added: AddedTokens) -> None:
    """Add tokens, which get the next ids.

    Raises:
        ModelError: they are to have other ids.
    """
    for id, token in sorted(added.names.items()):
        special = token in added.special
        backend.add_tokens([backends.AddedToken(token, normalized=False, special=special)])
        if backend.token_to_id(token) != id:
            raise ModelError(f"added token {token!r} must have the next id, got {id}")
