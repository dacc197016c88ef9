"""Languages of NLLB, M2M100, SMaLL-100, mBART and mBART-50 against the reference's tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from model.checkpoint import ModelError
from model.config import EngineConfig
from model.engine import Engine
from model.families import m2m_100
from model.loader import LoadedModel, load_model
from seqserve.schemas import GenerateRequest, ScoreRequest, TokenizeRequest
from service.check import cut
from service.inspection import Inspector
from service.served import generator_of
from tests.parity.families import reference_model
from tests.parity.tokenizer_files import (
    charsmap,
    m2m100,
    mbart,
    mbart50,
    nllb,
    processor_of,
    scored,
    sentences,
    small100,
    write_pieces,
)

transformers = pytest.importorskip("transformers", reason="the reference is not installed")
generate_merges = pytest.importorskip("transformers.tokenization_utils_base").generate_merges

TEXTS = ["moon", " the  moon ", "Über, ça!", "a\nb\tc", "日本 42", "eng Latn", "x" * 50]


@pytest.fixture(scope="session")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SentencePiece model."""
    return write_pieces(tmp_path_factory.mktemp("pieces") / "sentencepiece.bpe.model")


KINDS: dict[str, Any] = {
    "nllb": (nllb, {}),
    "nllb-legacy": (nllb, {"legacy_behaviour": True}),
    "m2m100": (m2m100, {}),
    "m2m100-wmt21": (m2m100, {"language_codes": "wmt21"}),
    "mbart": (mbart, {}),
    "mbart-50": (mbart50, {}),
}
LANGUAGES = {
    "nllb": ("fra_Latn", "zho_Hans", "eng_Latn"),
    "m2m100": ("ja", "de", "en"),
    "mbart": ("ro_RO", "ja_XX", "en_XX"),
}


def languages(kind: str) -> tuple[str, ...]:
    return LANGUAGES[kind.split("-")[0]]


def save(directory: Path, kind: str, pieces: Path, **options: Any) -> tuple[Any, Any]:
    """A whole model directory; the reference's tokenizer and network."""
    make, settings = KINDS[kind]
    tokenizer = make(directory, pieces, **settings)
    sizes = {"vocab_size": len(tokenizer.get_vocab()) + 108, "decoder_start_token_id": 2} | options
    network = reference_model("mbart" if kind.startswith("mbart") else "m2m_100", **sizes)
    network.save_pretrained(directory)
    return tokenizer, network


def inspector_of(model: LoadedModel) -> Inspector:
    generator = generator_of(model)
    network: Any = model.network
    return Inspector(model.spec, generator.source, generator.target, network.heads, model.languages)


@pytest.mark.parametrize("kind", KINDS)
def test_source_ids_equal_the_reference_tokenizer_s(
    kind: str, pieces: Path, tmp_path: Path
) -> None:
    tokenizer, _ = save(tmp_path, kind, pieces)
    model = load_model(tmp_path, "cpu")
    inspector = inspector_of(model)
    texts = TEXTS + sentences(1000, 1)
    for code in languages(kind):
        tokenizer.src_lang = code
        expected = tokenizer(texts)["input_ids"]
        request = TokenizeRequest(inputs=texts, src_lang=code)
        assert inspector.tokenize(request) == expected
    assert model.source_tokenizer is not None
    assert model.languages is not None
    codes = set(model.languages.ids.values())
    for ids in expected:
        text = tokenizer.decode([id for id in ids if id not in codes], skip_special_tokens=True)
        assert model.source_tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_all_languages_of_the_reference_are_known(kind: str, pieces: Path, tmp_path: Path) -> None:
    tokenizer, _ = save(tmp_path, kind, pieces)
    found = load_model(tmp_path, "cpu").languages
    assert found is not None
    assert len(found.ids) == {"nllb": 202, "m2m100": 100, "mbart": 25}.get(
        kind.removesuffix("-legacy"), 8 if "wmt" in kind else 52
    )
    token = "__{}__" if kind.startswith("m2m") else "{}"
    for code, id in found.ids.items():
        assert tokenizer.convert_tokens_to_ids(token.format(code)) == id
    assert found.find("__en__") == (found.ids["en"] if kind.startswith("m2m") else None)
    assert found.default_src == languages(kind)[-1]
    assert found.default_tgt is None


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_of_a_batch_is_in_its_own_languages(
    kind: str, pieces: Path, tmp_path: Path
) -> None:
    tokenizer, network = save(tmp_path, kind, pieces)
    model = load_model(tmp_path, "cpu")
    codes = languages(kind)
    texts = sentences(6, 2)
    pairs = [(codes[i % 3], codes[(i + 1 + i // 3) % 3]) for i in range(6)]
    for beams in (1, 3):
        parameters = [
            {"src_lang": src, "tgt_lang": tgt, "num_beams": beams, "max_new_tokens": 12}
            for src, tgt in pairs
        ]
        generator = generator_of(model)
        plans = generator.plan(
            GenerateRequest.model_validate({"inputs": texts, "parameters": parameters})
        )
        engine = Engine(model, EngineConfig())
        for plan in plans:
            engine.submit(plan.sequences[0])
        found = {e.sequence: e.hypotheses for e in engine.run() if getattr(e, "hypotheses", ())}
        for plan, text, (src, tgt) in zip(plans, texts, pairs, strict=True):
            tokenizer.src_lang = src
            token = f"__{tgt}__" if kind.startswith("m2m") else tgt
            answer = network.generate(
                **tokenizer(text, return_tensors="pt"),
                forced_bos_token_id=tokenizer.convert_tokens_to_ids(token),
                num_beams=beams,
                max_new_tokens=12,
            )
            expected = cut(answer[0, 1:].tolist(), {2})
            row = plan.sequences[0]
            tokens = list(found[row][0].tokens) if beams > 1 else row.tokens
            assert tokens == expected
            assert tokens[0] == tokenizer.convert_tokens_to_ids(token)


def test_a_model_whose_decoder_starts_with_a_language_starts_with_the_one_asked_for(
    pieces: Path, tmp_path: Path
) -> None:
    tokenizer = mbart(tmp_path / "t", pieces)
    romanian, japanese = (tokenizer.convert_tokens_to_ids(c) for c in ("ro_RO", "ja_XX"))
    _, network = save(tmp_path, "mbart", pieces, decoder_start_token_id=romanian)
    model = load_model(tmp_path, "cpu")
    assert model.languages is not None
    assert model.languages.default_tgt == "ro_RO"
    tokenizer.src_lang = "en_XX"
    for code, id in ((None, romanian), ("ja_XX", japanese)):
        [plan] = generator_of(model).plan(
            GenerateRequest.model_validate(
                {"inputs": "the moon", "parameters": {"tgt_lang": code, "max_new_tokens": 9}}
            )
        )
        row = plan.sequences[0]
        assert row.prefix == [id]
        engine = Engine(model, EngineConfig())
        engine.submit(row)
        list(engine.run())
        ids = tokenizer("the moon", return_tensors="pt")
        answer = network.generate(
            **ids,
            decoder_start_token_id=id,
            max_new_tokens=9,
            num_beams=1,
        )
        assert row.tokens == cut(answer[0, 1:].tolist(), {2})


def test_small_100_names_the_target_in_the_source_alone(pieces: Path, tmp_path: Path) -> None:
    save(tmp_path, "m2m100", pieces)
    small100(tmp_path, pieces)
    model = load_model(tmp_path, "cpu")
    assert model.languages is not None
    german = model.languages.ids["de"]
    [plan] = generator_of(model).plan(
        GenerateRequest.model_validate(
            {"inputs": "moon", "parameters": {"src_lang": "en", "tgt_lang": "de"}}
        )
    )
    [row] = plan.sequences
    assert (row.src[0], row.src[-1], row.prefix) == (german, 2, [2])
    assert row.decoding.forced_bos_token_id == -1
    [scored] = inspector_of(model).plan_score(
        ScoreRequest(inputs="moon", targets="moon", tgt_lang="de")
    )
    assert scored.src == row.src
    assert german not in (scored.labels or [])


def test_files_that_name_no_class_are_read_by_their_frame(pieces: Path, tmp_path: Path) -> None:
    for kind, before in (("nllb", True), ("nllb-legacy", False), ("mbart-50", True)):
        save(tmp_path / kind, kind, pieces)
        (tmp_path / kind / "tokenizer_config.json").unlink()
        found = load_model(tmp_path / kind, "cpu").languages
        assert found is not None
        assert found.before is before


@pytest.mark.parametrize("kind", ["mbart", "mbart-50"])
def test_a_sentencepiece_model_alone_gives_the_same_ids(
    kind: str, pieces: Path, tmp_path: Path
) -> None:
    tokenizer, _ = save(tmp_path, kind, pieces)
    (tmp_path / "tokenizer.json").unlink()
    shutil.copy(pieces, tmp_path)
    model = load_model(tmp_path, "cpu")
    texts = [*sentences(1000, 4), "", "a  b", " c", "don't </s> stop"]
    for code in languages(kind):
        tokenizer.src_lang = code
        found = inspector_of(model).tokenize(TokenizeRequest(inputs=texts, src_lang=code))
        assert found[:-1] == tokenizer(texts[:-1])["input_ids"]
        assert found[-1].count(2) == 1
    assert model.languages is not None
    for code, id in model.languages.ids.items():
        assert tokenizer.convert_tokens_to_ids(code) == id
    assert model.source_tokenizer is not None
    assert model.source_tokenizer.decode(found[0]) == texts[0]


def test_an_nllb_with_a_sentencepiece_model_alone_takes_its_codes_from_its_files(
    pieces: Path, tmp_path: Path
) -> None:
    save(tmp_path, "nllb", pieces)
    (tmp_path / "tokenizer.json").unlink()
    shutil.copy(pieces, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = {"tokenizer_class": "NllbTokenizer"}
    path.write_text(json.dumps(settings))
    codes = {"additional_special_tokens": ["ace_Arab", "eng_Latn"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(codes))
    found = load_model(tmp_path, "cpu").languages
    assert found is not None
    size = processor_of(pieces).get_piece_size()
    assert found.ids == {"ace_Arab": size + 1, "eng_Latn": size + 2}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SentencePiece model of NLLB's kind."""
    path = tmp_path_factory.mktemp("bpe") / "sentencepiece.bpe.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences(400, 0)),
            model_writer=file,
            model_type="bpe",
            vocab_size=70,
            minloglevel=2,
        )
    return path


def nllb_reference(bpe: Path) -> Any:
    """What the reference makes of that model."""
    pieces = [piece for piece, _ in scored(bpe)]
    merges = generate_merges({piece: id for id, piece in enumerate(pieces)})
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces[3:]]
    return transformers.NllbTokenizer(
        vocab={token: id for id, token in enumerate(tokens)},
        merges=merges,
        _spm_precompiled_charsmap=charsmap(bpe.read_bytes()),
    )


def test_an_nllb_with_a_sentencepiece_model_alone_has_the_references_ids(
    bpe: Path, tmp_path: Path
) -> None:
    shutil.copy(bpe, tmp_path)
    config = {"model_type": "m2m_100", "tokenizer_class": "NllbTokenizer"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source, _ = m2m_100.tokenizers(tmp_path)
    reference = nllb_reference(bpe)
    assert source is not None
    assert source.languages is not None
    # As published: pieces, languages, <mask>. (The reference built from parts puts <mask> first.)
    mask = source.vocab_size - 1
    first = mask - 202
    names = reference.convert_ids_to_tokens(range(len(reference)))
    assert [source.token(id) for id in range(first)] == names[:first]
    assert [source.token(id) for id in range(first, mask)] == names[first + 1 :]
    assert source.token(mask) == "<mask>"
    assert list(source.languages.ids) == names[first + 1 :]
    texts = [text.rstrip() for text in TEXTS + sentences(1000, 5)]
    texts += ["a  b", "  moon", "\u3000wide \u00a0 Ａ ﬁ", "▁moon"]
    assert source.encode(texts, framed=False) == [
        ids[1:-1] for ids in reference(texts)["input_ids"]
    ]
    assert source.encode(["moon "]) == source.encode(["moon"])  # as SentencePiece has it


def test_a_class_may_be_named_by_config_json(pieces: Path, tmp_path: Path) -> None:
    tokenizer, _ = save(tmp_path, "mbart-50", pieces)
    (tmp_path / "tokenizer.json").unlink()
    shutil.copy(pieces, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"src_lang": null, "language_codes": "ML50"}')
    change_json(tmp_path / "config.json", tokenizer_class="MBart50Tokenizer")
    found = load_model(tmp_path, "cpu").languages
    assert found is not None
    assert (len(found.ids), found.before) == (52, True)
    assert found.ids["sl_SI"] == tokenizer.convert_tokens_to_ids("sl_SI")


def test_small_100_is_known_by_the_code_that_comes_with_it(pieces: Path, tmp_path: Path) -> None:
    save(tmp_path, "m2m100", pieces)
    (tmp_path / "tokenization_small100.py").write_text("")
    found = load_model(tmp_path, "cpu").languages
    assert found is not None
    assert (found.source_names, found.target) == ("tgt_lang", "none")


ADDED = {"<term>": False, "<term>x": False, "__tlh__": True, "<drop>": True}
"""Tokens that somebody trained a model further with, and whether they are special."""


@pytest.mark.parametrize("described", [True, False])
def test_added_tokens_are_found_as_by_the_reference(
    described: bool, pieces: Path, tmp_path: Path
) -> None:
    tokenizer, _ = save(tmp_path, "m2m100", pieces)
    ids = {token: tokenizer.encoder_size + 108 + i for i, token in enumerate(ADDED)}
    entries = {
        str(id): {"content": token, "special": ADDED[token], "normalized": False}
        for token, id in ids.items()
    }
    path = tmp_path / "tokenizer_config.json"
    special = [token for token in ADDED if ADDED[token]]
    settings = {"tokenizer_class": "M2M100Tokenizer", "extra_special_tokens": special}
    if described:
        entries |= json.loads(path.read_text())["added_tokens_decoder"]
        path.write_text(json.dumps(settings | {"added_tokens_decoder": entries}))
    else:
        path.write_text(json.dumps(settings))
        (tmp_path / "added_tokens.json").write_text(json.dumps(ids))
    reference = transformers.M2M100Tokenizer.from_pretrained(tmp_path)
    source, _ = m2m_100.tokenizers(tmp_path)
    assert source is not None
    assert source.languages is not None
    assert source.languages.ids["tlh"] == ids["__tlh__"]
    assert len(source.languages.ids) == 101
    texts = [text.replace("42", "<term>") for text in sentences(300, 6)]
    texts += ["<term>", "moon<term>x the<term>", "<term><term> river", " <term> "]
    expected = reference(texts)["input_ids"]
    assert [ids[1:] for ids in expected] == source.encode(texts)
    assert any(ids["<term>"] in row for row in expected)
    for row in expected:
        row = [*row[1:], ids["<drop>"]]
        assert source.decode(row) == reference.decode(row, skip_special_tokens=True)
    [dropped] = source.encode(["a <drop> b"])
    assert ids["<drop>"] not in dropped


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("added_tokens.json", '{"<a>": "7"}', "expected tokens with their ids"),
        ("added_tokens.json", "[]", "expected an object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": {}}}',
            "added_tokens_decoder must describe tokens by id",
        ),
    ],
)
def test_broken_added_tokens_are_refused(
    file: str, content: str, message: str, pieces: Path, tmp_path: Path
) -> None:
    m2m100(tmp_path, pieces)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=f"{file}: {message}"):
        m2m_100.tokenizers(tmp_path)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_default_target_is_what_the_model_forces(pieces: Path, tmp_path: Path) -> None:
    save(tmp_path, "mbart-50", pieces)
    path = tmp_path / "generation_config.json"
    before = load_model(tmp_path, "cpu").languages
    assert before is not None
    forced = {"forced_bos_token_id": before.ids["ja_XX"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | forced))
    found = load_model(tmp_path, "cpu").languages
    assert found is not None
    assert found.default_tgt == "ja_XX"
