"""The family `marian` against `transformers`."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import ModelError
from model.families import marian
from model.loader import load_model
from model.tokenizer import IncrementalDetokenizer
from service.check import Both, our_logits, reference_tokens
from tests.parity.checkpoints import (
    ATOL,
    POSITIONS,
    SIZES,
    edit_config,
    largest_difference,
    our_defaults,
    save_and_load,
)
from tests.parity.families import LAST, make, reference_model
from tests.parity.tokenizer_files import charsmap, train_pieces

transformers = pytest.importorskip("transformers", reason="the reference is not installed")

PAD = LAST


# --- files ---------------------------------------------------------------------------------------


def with_positions(both: Both) -> dict[str, torch.Tensor]:
    """The tensors of published files, which hold the position encodings too."""
    tensors = load_file(both.ours.directory / "model.safetensors")
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embed_positions.weight"
        assert name not in tensors
        tensors[name] = both.reference.state_dict()[name].clone()
    return tensors


def test_positions_in_the_file_are_read(tmp_path: Path) -> None:
    both = make(tmp_path, "opus")
    computed = our_logits(both, [([5, 6], [PAD, 7])])[0]
    tensors = with_positions(both)
    save_file(tensors, tmp_path / "model.safetensors")
    read = Both(both.reference, load_model(tmp_path, "cpu"))
    assert largest_difference(read) < ATOL
    assert read.ours.parameters == both.ours.parameters + 2 * POSITIONS * SIZES["d_model"]
    tensors["model.encoder.embed_positions.weight"] += 1.0
    save_file(tensors, tmp_path / "model.safetensors")
    moved = Both(both.reference, load_model(tmp_path, "cpu"))
    assert (our_logits(moved, [([5, 6], [PAD, 7])])[0] - computed).abs().max() > 0.01


def test_published_files_name_every_table(tmp_path: Path) -> None:
    both = make(tmp_path, "opus")
    tensors = with_positions(both)
    (tmp_path / "model.safetensors").unlink()
    table = tensors["model.shared.weight"]
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    tensors |= dict.fromkeys((*names, "lm_head.weight"), table)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert largest_difference(Both(both.reference, load_model(tmp_path, "cpu"))) < ATOL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"static_position_embeddings": False}, "static_position_embeddings must be True"),
        ({"normalize_before": True}, "normalize_before must be False"),
        ({"normalize_embedding": True}, "normalize_embedding must be False"),
        ({"activation_function": "tanh"}, "activation_function must be one of"),
        ({"decoder_vocab_size": 60}, "decoder_vocab_size must equal vocab_size"),
        ({"num_beams": 4, "do_sample": True}, "num_beams 4 with do_sample is not implemented"),
        ({"bad_words_ids": [[99]]}, r"bad_words_ids must be lists of ids in \[0, 53\)"),
        ({"rope_theta": 1e4}, "unknown keys: rope_theta"),
        ({"pad_token_id": None}, "missing key: pad_token_id"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path, "opus")
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        load_model(tmp_path, "cpu")


# --- generation defaults -------------------------------------------------------------------------

PUBLISHED = {
    "bad_words_ids": [[PAD]],
    "num_beams": 4,
    "max_length": 30,
    "forced_eos_token_id": 0,
    "renormalize_logits": True,
}
"""The `generation_config.json` of OPUS-MT models."""


def eager_to_pad(directory: Path, **defaults: Any) -> Both:
    """A model that would say `<pad>` at every step if it could."""
    reference = reference_model("opus")
    reference.final_logits_bias[0, PAD] += 6.0
    reference.generation_config.update(**(PUBLISHED | defaults))
    return save_and_load(directory, reference)


@pytest.mark.parametrize("renormalize", [True, False])
def test_generation_config_is_what_a_request_without_parameters_gets(
    renormalize: bool, tmp_path: Path
) -> None:
    both = eager_to_pad(tmp_path, renormalize_logits=renormalize)
    answers = [our_defaults(both, source) for source in both.sources(8)]
    assert answers == [reference_tokens(both, source) for source in both.sources(8)]
    assert not any(PAD in answer[0] for answer in answers)


def test_pad_is_never_generated_whatever_a_request_bans(tmp_path: Path) -> None:
    both = eager_to_pad(tmp_path)
    for parameters in ({"num_beams": 1}, {"seed": 1}, {"bad_words": [[7]]}, {"do_sample": False}):
        for source in both.sources(3):
            [answer] = our_defaults(both, source, **parameters)
            assert PAD not in answer


# --- tokenizers ----------------------------------------------------------------------------------

WORDS = [
    *("the", "a", "tree", "house", "river", "moon", "reads", "writes", "green", "old", "small"),
    *("Haus", "Baum", "Fluss", "der", "die", "das", "liest", "schreibt", "grün", "alt", "unter"),
    *("says", "of", "above", "bird", "naïve", "café", "Übung", "straße", "çok", "дом", "река"),
]
TRICKY = [
    "",
    " ",
    "   the  tree ",
    "The river, the moon.",
    "🙂 the 🏳️‍🌈 moon",
    "naïve café — “quoted” … ½ ﬁ Ⅳ",
    "תמורה مرحبا 日本語",
    ">>deu<< the tree",
    ">>deu<<the tree",
    ">>xyz<< the tree",
    " >>deu<< the tree",
    ">>deu the tree",
    "the >>deu<< tree",
    "tab\there\nand there",
    "zero\u200bwidth \u00a0 nbsp\u3000wide",
    "\x07 bell \ufeff",
    "e\u0301 combining",
    "x" * 300,
]


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    marks = ["", "", ",", ".", " 🙂", "!", " 42", " ?"]
    return [
        rng.choice(["", "", " ", ">>deu<< "])
        + " ".join(rng.choice(WORDS) + rng.choice(marks) for _ in range(rng.randint(1, 9)))
        for _ in range(count)
    ]


def train(path: Path, seed: int) -> sentencepiece.SentencePieceProcessor:
    corpus = [s.replace(">>deu<< ", "") for s in sentences(400, seed)]
    path.write_bytes(train_pieces(iter(corpus), vocab_size=90))
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def pieces(spm: sentencepiece.SentencePieceProcessor) -> list[str]:
    return [spm.id_to_piece(id) for id in range(spm.get_piece_size())][3:]


@pytest.fixture(scope="module", params=["one vocabulary", "two vocabularies"])
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer files as published, some of the pieces missing from the vocabulary."""
    path = tmp_path_factory.mktemp("marian")
    source, target = (train(path / f"{side}.spm", i) for i, side in enumerate(("source", "target")))
    own, other = pieces(source)[:-5], pieces(target)[:-5]

    def write(name: str, tokens: list[str]) -> None:
        order = ["</s>", "<unk>", *dict.fromkeys(tokens), ">>deu<<", "<pad>"]
        (path / name).write_text(json.dumps({token: id for id, token in enumerate(order)}))

    if request.param == "one vocabulary":
        write("vocab.json", own + other)
    else:
        write("vocab.json", own)
        write("target_vocab.json", other)
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> Iterator[Any]:
    separate = (directory / "target_vocab.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends a package that it does not use
        yield transformers.MarianTokenizer(
            source_spm=str(directory / "source.spm"),
            target_spm=str(directory / "target.spm"),
            vocab=str(directory / "vocab.json"),
            target_vocab_file=str(directory / "target_vocab.json") if separate else None,
            separate_vocabs=separate,
        )


def test_ids_equal_the_reference_tokenizers(directory: Path, reference: Any) -> None:
    source, target = marian.tokenizers(directory)
    assert source is not None
    assert target is not None
    texts = TRICKY + sentences(1000, seed=7)
    assert source.encode(texts) == reference(texts)["input_ids"]
    assert target.encode(texts) == reference(text_target=texts)["input_ids"]
    assert any(source.unk_id in ids for ids in source.encode(texts))


def test_text_of_ids_equals_the_reference_tokenizers(directory: Path, reference: Any) -> None:
    _, target = marian.tokenizers(directory)
    assert target is not None
    rng = random.Random(3)
    rows = target.encode(TRICKY + sentences(300, seed=8))
    known = list(range(target.vocab_size))
    rows += [rng.choices(known, k=rng.randint(1, 12)) for _ in range(300)]
    for ids in rows:
        assert target.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_pieces_of_a_stream_concatenate_to_the_text(directory: Path) -> None:
    _, target = marian.tokenizers(directory)
    assert target is not None
    for text in TRICKY + sentences(50, seed=9):
        [ids] = target.encode([text], framed=False)
        detokenizer = IncrementalDetokenizer(target)
        streamed = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
        assert streamed.rstrip() == target.decode(ids)


def test_special_tokens_in_a_text_are_text(directory: Path) -> None:
    source, _ = marian.tokenizers(directory)
    assert source is not None
    [ids] = source.encode(["</s> the <pad>"])
    assert ids.count(source.vocabulary["</s>"]) == 1
    assert source.vocabulary["<pad>"] not in ids


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a `tokenizer.json` alone, as conversions for other runtimes have it."""
    path = tmp_path_factory.mktemp("json")
    spm = train(path / "source.spm", 0)
    scores = {spm.id_to_piece(id): spm.get_score(id) for id in range(3, len(spm))}
    vocab = [("</s>", 0.0), ("<unk>", 0.0), *scores.items(), (">>deu<<", 0.0), ("<pad>", 0.0)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=1))
    rules = charsmap((path / "source.spm").read_bytes())
    backend.normalizer = tokenizers.normalizers.Precompiled(rules)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Metaspace()]
    )
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 0)]
    )
    backend.add_special_tokens(["</s>", "<unk>", "<pad>"])
    backend.save(str(path / "tokenizer.json"))
    return path


def test_a_tokenizer_json_alone_serves_both_sides(one_file: Path) -> None:
    source, target = marian.tokenizers(one_file)
    assert source is not None
    assert target is not None
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(one_file / "tokenizer.json")
    )
    code = reference.convert_tokens_to_ids(">>deu<<")
    assert source.languages is not None
    assert (source.languages.ids, target.languages) == ({"deu": code}, None)
    texts = [t for t in TRICKY + sentences(1000, seed=6) if not t.startswith(">>")]
    expected = reference(texts)["input_ids"]
    assert source.encode(texts) == target.encode(texts) == expected
    assert source.encode([f">>deu<< {text}" for text in texts]) == [[code, *e] for e in expected]
    assert source.encode([">>xyz<< the tree"]) == [[1, *reference("the tree")["input_ids"]]]
    for ids in expected:
        assert target.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert target.decode([code]) == reference.decode([code]) == ">>deu<<"


def test_a_tokenizer_json_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(ModelError, match=r"</s> and <unk> must be in the vocabulary"):
        marian.tokenizers(tmp_path)


def test_added_tokens_are_found_as_by_the_reference(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    ids = {"<term>": len(vocabulary), ">>ces<<": len(vocabulary) + 1}
    (tmp_path / "added_tokens.json").write_text(json.dumps(ids))
    separate = (directory / "target_vocab.json").exists()
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends a package that it does not use
        reference = transformers.MarianTokenizer.from_pretrained(tmp_path)
    source, target = marian.tokenizers(tmp_path)
    assert source is not None
    assert target is not None
    assert source.languages is not None
    assert source.languages.ids["ces"] == ids[">>ces<<"]
    texts = [text.replace("moon", "<term>") for text in TRICKY + sentences(300, seed=5)]
    texts += [">>ces<< the moon", "a<term>tree", "<term>"]
    assert source.encode(texts) == reference(texts)["input_ids"]
    assert any(ids["<term>"] in row for row in source.encode(texts))


def test_languages_are_the_codes_of_the_vocabulary(directory: Path, reference: Any) -> None:
    source, target = marian.tokenizers(directory)
    assert source is not None
    assert target is not None
    assert source.languages is not None
    assert source.languages.ids == {"deu": source.vocabulary[">>deu<<"]}
    assert source.languages.find(">>deu<<") == source.languages.find("deu")
    assert target.languages is None
    texts = [text for text in TRICKY + sentences(1000, seed=4) if not text.startswith(">>")]
    head, tail = source.languages.around(source.languages.find("deu"))
    found = [[*head, *ids, *tail] for ids in source.encode(texts, framed=False)]
    assert found == reference([f">>deu<< {text}" for text in texts])["input_ids"]


def test_a_model_of_one_target_has_no_languages(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "vocab.json"
    vocabulary = {k: v for k, v in json.loads(path.read_text()).items() if k != ">>deu<<"}
    path.write_text(json.dumps(vocabulary))
    source, _ = marian.tokenizers(tmp_path)
    assert source is not None
    assert source.languages is None


def test_a_language_code_alone_is_one_token(directory: Path) -> None:
    source, _ = marian.tokenizers(directory)
    assert source is not None
    assert source.encode([">>deu<<"], framed=False) == [[source.vocabulary[">>deu<<"]]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected an object"),
        ('{"a": 0}', "</s> and <unk> must be in the vocabulary"),
        ('{"</s>": "0", "<unk>": 1}', "expected tokens with their ids"),
    ],
)
def test_a_broken_vocabulary_is_refused(
    content: str, message: str, directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "vocab.json").write_text(content)
    with pytest.raises(ModelError, match=rf"vocab\.json: {message}"):
        marian.tokenizers(tmp_path)
