"""Small tokenizer files as published, written by `transformers` itself or read by it."""

from __future__ import annotations

import io
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece

from model.multilingual import MBART_CODES

WORDS = ["the", "moon", "Über", "ça", "42", "don't", "reads", "日本", "مرحبا", ",", "🙂", "river"]


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 10))) for _ in range(count)]


def train_pieces(texts: Iterator[str], **options: Any) -> bytes:
    """A small SentencePiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts,
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def write_pieces(path: Path, **options: Any) -> Path:
    """A SentencePiece model of `sentences` in a file."""
    options = {"vocab_size": 90} | options
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(train_pieces(iter(sentences(400, 0)), **options))
    return path


def processor_of(pieces: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(pieces))


def scored(pieces: Path) -> list[tuple[str, float]]:
    """Pieces with their scores."""
    spm = processor_of(pieces)
    return [(spm.id_to_piece(i), spm.get_score(i)) for i in range(spm.get_piece_size())]


# --- one tokenizer each: written to a directory, returned as the reference's ---------------------


def nllb(directory: Path, pieces: Path, **settings: Any) -> Any:
    import transformers

    spm = scored(pieces)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece, _ in spm[3:])]
    letters = [t for t in tokens if len(t) == 1]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*tokens, *letters]))}
    tokenizer = transformers.NllbTokenizer(vocab=vocab, merges=[], **settings)
    tokenizer.save_pretrained(directory)
    return tokenizer


def m2m100(directory: Path, pieces: Path, **settings: Any) -> Any:
    import transformers

    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece, _ in scored(pieces)[3:-5])]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    tokenizer = transformers.M2M100Tokenizer(str(directory / "vocab.json"), str(pieces), **settings)
    tokenizer.save_pretrained(directory)
    return tokenizer


def small100(directory: Path, pieces: Path) -> Any:
    """M2M100's files under the name of a class that the reference does not have."""
    tokenizer = m2m100(directory, pieces)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "SMALL100Tokenizer"}
    path.write_text(json.dumps(settings))
    return tokenizer


def mbart50(directory: Path, pieces: Path, **settings: Any) -> Any:
    import transformers

    tokenizer = transformers.MBart50Tokenizer(vocab=scored(pieces), **settings)
    tokenizer.save_pretrained(directory)
    return tokenizer


def mbart(directory: Path, pieces: Path, **settings: Any) -> Any:
    import transformers

    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    codes = [(code, 0.0) for code in [*MBART_CODES.split(), "<mask>"]]  # as published
    vocab = [*special, *scored(pieces)[3:], *codes]
    tokenizer = transformers.MBartTokenizer(vocab=vocab, **settings)
    tokenizer.save_pretrained(directory)
    return tokenizer


def pegasus(directory: Path, pieces: Path) -> Any:
    import transformers

    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scored(pieces)[3:]]
    tokenizer = transformers.PegasusTokenizer(vocab=vocab)
    tokenizer.save_pretrained(directory)
    return tokenizer


def t5(directory: Path, pieces: Path, sentinels: int = 100) -> Any:
    import transformers

    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scored(pieces)[3:]]
    vocab += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(sentinels))]
    tokenizer = transformers.T5Tokenizer(vocab=vocab, extra_ids=sentinels)
    tokenizer.save_pretrained(directory)
    return tokenizer


def byt5(directory: Path, pieces: Path) -> Any:
    """Bytes, which need no pieces."""
    import transformers

    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.save_pretrained(directory)
    return tokenizer


def bart(directory: Path, pieces: Path) -> Any:
    """A byte-level BPE, `vocab.json` and `merges.txt`."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sentences(400, 0), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    backend.model.save(str(directory))
    return transformers.BartTokenizer(
        vocab=str(directory / "vocab.json"), merges=str(directory / "merges.txt")
    )


def marian(directory: Path, pieces: Path) -> Any:
    """`source.spm`, `target.spm` and one vocabulary for both."""
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    for side in ("source", "target"):
        (directory / f"{side}.spm").write_bytes(pieces.read_bytes())
    tokens = ["</s>", "<unk>", *(piece for piece, _ in scored(pieces)[3:]), "<pad>"]
    (directory / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends a package that it does not use
        return transformers.MarianTokenizer(
            source_spm=str(directory / "source.spm"),
            target_spm=str(directory / "target.spm"),
            vocab=str(directory / "vocab.json"),
        )


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a protocol buffer, by number."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        if kind == 2:
            yield tag >> 3, message[at : at + size]
        at += size


def charsmap(serialized: bytes) -> bytes:
    """The rules by which a SentencePiece model normalises."""
    [normalizer] = [value for number, value in fields(serialized) if number == 3]
    [rules] = [value for number, value in fields(normalizer) if number == 2]
    return rules
