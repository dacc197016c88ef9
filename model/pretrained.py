"""What the checkpoints in Hugging Face's format have in common, whatever their family.

`Options` reads a configuration strictly. `read_spec` reads special ids and what a model asks for
where a request says nothing. `Tables` finds out which token tables are one. The layers and their
names (`stack_names`) are those that all descendants of fairseq's Transformer share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from model.attention import MultiHeadAttention
from model.checkpoint import ModelError
from model.config import GenerationDefaults, ModelSpec, Task
from model.layers import (
    Activation,
    BiasedOutput,
    FeedForward,
    LayerNorm,
    PostNorm,
    PreNorm,
    token_table,
)
from model.transformer import DecoderLayer, EncoderLayer, Transformer
from seqserve.parameters import GenerationParameters

Shapes = Mapping[str, tuple[int, ...]]


def gelu_by_tanh(x: Tensor) -> Tensor:
    """The approximation of section 2 of https://arxiv.org/abs/1606.08415."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,  # exact, by the error function
    "gelu_new": gelu_by_tanh,
    "gelu_pytorch_tanh": gelu_by_tanh,
    "silu": F.silu,
    "swish": F.silu,
}

# --- keys ----------------------------------------------------------------------------------------

HARMLESS: Mapping[str, Sequence[str]] = {
    "says where the file comes from": (
        "_commit_hash",
        "_name_or_path",
        "_from_model_config",
        "architectures",
        "author",
        "kobart_version",
        "model_type",
        "transformers.js_config",
        "transformers_version",
    ),
    "concerns training only": (
        "activation_dropout",
        "attention_dropout",
        "decoder_layerdrop",
        "dropout",
        "encoder_layerdrop",
        "gradient_checkpointing",
        "init_std",
        "initializer_range",
        "replacing_rate",
        "save_step",
        "student_decoder_layers",
        "student_encoder_layers",
    ),
    "concerns a classifier on top": (
        "_num_labels",
        "classif_dropout",
        "classifier_dropout",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
    ),
    "says how the reference computes and what it returns; numbers are the same": (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "cache_config",
        "cache_implementation",
        "chunk_size_feed_forward",
        "compile_config",
        "continuous_batching_config",
        "disable_compile",
        "max_cache_len",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_past",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "tf_legacy_loss",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        "xla_device",
    ),
    "the server is told the dtype": ("dtype", "torch_dtype"),
    "tensors say it too, and are checked": ("num_hidden_layers", "add_bias_logits"),
    "the position offset is the family's; the reference does not read it either": (
        "extra_pos_embeddings",
    ),
    "a pipeline's, not the model's: a caller puts it in front of the text": ("prefix",),
    "the tokenizer files say it": (
        "cls_token_id",
        "mask_token_id",
        "sep_token_id",
        "tokenizer_class",
        "unk_token_id",
    ),
    "only of decoders without an encoder": ("add_cross_attention", "cross_attention_hidden_size"),
    "the request says how many answers it wants": ("num_return_sequences",),
    "a row whose logits are not finite ends with an error": ("remove_invalid_values",),
    "only of decoding with an assistant, which needs a second model": (
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "is_assistant",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "target_lookbehind",
    ),
}
"""Keys that may say anything, by the reason why nothing follows from them here."""

NO_OPS: Mapping[str, Any] = {
    "is_encoder_decoder": True,
    "is_decoder": False,
    "pruned_heads": {},
    "quantization_config": None,
    "tie_encoder_decoder": False,
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "do_blenderbot_90_layernorm": False,
    "dola_layers": None,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": 1.0,
    "low_memory": None,
    "max_time": None,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "prefill_chunk_size": None,
    "prompt_lookup_num_tokens": None,
    "sequence_bias": None,
    "speculation_type": None,
    "stop_strings": None,
    "token_healing": False,
    "top_h": None,
    "use_mtp": None,
    "watermarking_config": None,
}
"""Options that are not implemented, and the value by which each asks for nothing; so does null."""


class Options:
    """The keys of a configuration, each to be taken once; `finish` refuses what is left.

    Args:
        given: the configuration.
        source: how errors call it, where it is not `config.json`.
    """

    def __init__(self, given: Mapping[str, Any], source: str = "") -> None:
        self.source = source
        self.prefix = f"{source}: " if source else ""
        self._left = dict(given)

    def take(self, name: str, default: Any = None) -> Any:
        """A key's value; null is as good as absent."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def denies(self, name: str) -> bool:
        """Whether a key is there and null, where that says more than if it were absent."""
        return name in self._left and self._left[name] is None

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int:
        """Raises ModelError where the key is absent without a default, or too small."""
        value = self.take(name, default)
        if value is None:
            raise ModelError(f"{self.prefix}missing key: {name}")
        return self._checked(name, value, least)

    def optional(self, name: str, least: int = 0) -> int | None:
        """An integer or None."""
        value = self.take(name)
        return None if value is None else self._checked(name, value, least)

    def number(self, name: str) -> float | None:
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ModelError(f"{self.prefix}{name} must be a number, got {value!r}")
        return None if value is None else float(value)

    def flag(self, name: str, default: bool | None = None) -> bool | None:
        value = self.take(name, default)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.prefix}{name} must be true or false, got {value!r}")
        return None if value is None else bool(value)

    def token(self, name: str, vocab_size: int) -> int | None:
        """A token id or None; a list of one counts as that one."""
        value = self.take(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None:
            return None
        if not _is_int(value) or not 0 <= value < vocab_size:
            raise ModelError(
                f"{self.prefix}{name} must be one id in [0, {vocab_size}), got {value!r}"
            )
        return int(value)

    def tokens(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or several; none where the key is absent or null."""
        value = self.take(name)
        ids = value if isinstance(value, list) else [value]
        if value is None:
            return ()
        if not _is_ids(ids, vocab_size):
            raise ModelError(f"{self.prefix}{name} must be ids in [0, {vocab_size}), got {value!r}")
        return tuple(dict.fromkeys(ids))

    def sequences(self, name: str, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        """Lists of token ids."""
        value = self.take(name, [])
        if not isinstance(value, list) or not all(_is_ids(ids, vocab_size) for ids in value):
            raise ModelError(
                f"{self.prefix}{name} must be lists of ids in [0, {vocab_size}), got {value!r}"
            )
        return tuple(tuple(ids) for ids in value)

    def only(self, name: str, value: Any) -> None:
        """Refuse another value than the one that is implemented."""
        if (found := self.take(name, value)) != value:
            raise ModelError(
                f"{self.prefix}{name} must be {value!r} or left out (nothing else is implemented "
                f"here), got {found!r}"
            )

    def ignore(self, names: Iterable[str]) -> None:
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Raises ModelError: a key is left that nobody took, or an option asks for something.

        A key of a release to come asks for nothing as long as it is null.
        """
        for names in HARMLESS.values():
            self.ignore(names)
        for name, no_op in NO_OPS.items():
            self.only(name, no_op)
        unknown = sorted(name for name, value in self._left.items() if value is not None)
        if unknown:
            raise ModelError(f"{self.prefix}unknown keys: {', '.join(unknown)}")

    def _checked(self, name: str, value: Any, least: int) -> int:
        if not _is_int(value) or value < least:
            raise ModelError(
                f"{self.prefix}{name} must be an integer of at least {least}, got {value!r}"
            )
        return int(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ids(value: Any, vocab_size: int) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(_is_int(id) and 0 <= id < vocab_size for id in value)
    )


# --- shape ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What BART and its relatives say of their networks, under the names of `config.json`."""

    vocab_size: int
    d_model: int
    max_position_embeddings: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_layers: int
    decoder_attention_heads: int
    decoder_ffn_dim: int
    activation_function: str
    scale_embedding: bool
    tie_word_embeddings: bool

    @property
    def activation(self) -> Activation:
        return ACTIVATIONS[self.activation_function]

    @property
    def scale(self) -> float:
        """Factor on the token vectors."""
        return float(self.d_model**0.5) if self.scale_embedding else 1.0


def read_shape(options: Options) -> Shape:
    """Take a network's sizes.

    Raises:
        ModelError: one is missing or of the wrong kind, or the activation is not known.
    """
    sizes = {f.name: options.integer(f.name, least=1) for f in fields(Shape) if f.type == "int"}
    activation = options.take("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise ModelError(
            f"activation_function must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    # Under the names of other architectures, some files say the same again.
    options.only("hidden_size", sizes["d_model"])
    options.only("num_attention_heads", sizes["encoder_attention_heads"])
    return Shape(
        **sizes,
        activation_function=activation,
        scale_embedding=bool(options.flag("scale_embedding", False)),
        tie_word_embeddings=bool(options.flag("tie_word_embeddings", True)),
    )


# --- special tokens and generation ----------------------------------------------------------------


@dataclass(frozen=True)
class SpecialTokens:
    """What a family's own configuration class takes where a `config.json` names no id.

    Null is an answer to two of them: no `forced_eos_token_id`, and `bos` starts the decoder.

    Attributes:
        pad, bos, eos: `pad_token_id` and so on.
        start: `decoder_start_token_id`; where that is None too, `bos` starts the decoder.
        forced_eos: `forced_eos_token_id`, or None where the family forces none.
    """

    pad: int
    bos: int | None
    eos: int
    start: int | None
    forced_eos: int | None


def read_spec(
    family: str,
    options: Options,
    generation: Mapping[str, Any] | None,
    tokens: SpecialTokens,
    vocab_sizes: tuple[int, int],
    max_length: int,
) -> ModelSpec:
    """What the engine must know, from `config.json` and `generation_config.json`.

    Where the latter is there, what the former says of generation does not count, as in the
    reference; but for special ids that only `config.json` names.

    Args:
        options: `config.json`, of which all else has been taken.
        tokens: the family's own defaults.
        vocab_sizes: of source and target.
        max_length: positions of either side.

    Raises:
        ModelError: a key of either file is not known or asks for what is not implemented.
    """
    size = vocab_sizes[1]
    no_start = options.denies("decoder_start_token_id")
    if options.denies("forced_eos_token_id"):
        tokens = replace(tokens, forced_eos=None)
    pad = options.token("pad_token_id", min(vocab_sizes))
    ids, ends = _ids(options, size), options.tokens("eos_token_id", size)
    forced_bos = options.flag("force_bos_token_to_be_generated")
    defaults, new_tokens = read_defaults(options, size)
    tasks = read_tasks(options, size)
    options.finish()
    bos = tokens.bos if ids["bos"] is None else ids["bos"]
    if forced_bos and defaults.forced_bos_token_id is None:  # as that key was called before 2021
        defaults = replace(defaults, forced_bos_token_id=bos)
    forces = tokens.forced_eos is not None and generation is None
    if forces and defaults.forced_eos_token_id is None:
        last = _known("forced_eos_token_id", size, tokens.forced_eos)
        defaults = replace(defaults, forced_eos_token_id=last)
    if generation is not None:
        own = Options(generation, "generation_config.json")
        own.ignore(["pad_token_id"])
        ids |= {name: id for name, id in _ids(own, size).items() if id is not None}
        ends = own.tokens("eos_token_id", size) or ends
        defaults, new_tokens = read_defaults(own, size)
        own.finish()
    starts = (tokens.start, ids["bos"], tokens.bos)
    if no_start:
        starts = (ids["bos"], tokens.bos, tokens.start)
    return ModelSpec(
        family=family,
        src_vocab_size=vocab_sizes[0],
        tgt_vocab_size=size,
        pad_id=_known("pad_token_id", min(vocab_sizes), pad, tokens.pad),
        decoder_start_ids=(_known("decoder_start_token_id", size, ids["start"], *starts),),
        eos_ids=ends or (_known("eos_token_id", size, tokens.eos),),
        unk_id=None,
        max_src=max_length,
        max_tgt=max_length,
        default_max_new_tokens=min(256 if new_tokens is None else new_tokens, max_length),
        defaults=defaults,
        tasks=tasks,
    )


def read_tasks(options: Options, vocab_size: int) -> dict[str, Task]:
    """Take `task_specific_params`.

    Files are full of tasks that nobody asks for, so that one which cannot be served is no reason to
    refuse the model: it says so when it is named.

    Raises:
        ModelError: they are no objects by name.
    """
    given = options.take("task_specific_params", {})
    if not isinstance(given, dict):
        raise ModelError(
            f"{options.prefix}task_specific_params must hold tasks by name, got {given!r}"
        )
    return {name: _task(name, stated, vocab_size) for name, stated in given.items()}


def _task(name: str, stated: Any, vocab_size: int) -> Task:
    if not isinstance(stated, dict):
        return Task(fault=f"task_specific_params.{name} must be an object, got {stated!r}")
    own = Options(stated, f"task_specific_params.{name}")
    own.ignore(["max_position_embeddings"])  # Pegasus': of the model that was trained for the task
    prefix = own.take("prefix", "")
    if not isinstance(prefix, str):
        return Task(fault=f"{own.prefix}prefix must be a text, got {prefix!r}")
    try:
        defaults, new_tokens = read_defaults(own, vocab_size)
        own.finish()
    except ModelError as error:
        return Task(fault=str(error))
    return Task(prefix, new_tokens, defaults)


def with_generation(spec: ModelSpec, generation: Mapping[str, Any] | None) -> ModelSpec:
    """The spec with what a `generation_config.json` says of everything but special ids."""
    if generation is None:
        return spec
    own = Options(generation, "generation_config.json")
    defaults, new_tokens = read_defaults(own, spec.tgt_vocab_size)
    own.finish()
    new_tokens = min(new_tokens or spec.default_max_new_tokens, spec.max_tgt)
    return replace(spec, defaults=defaults, default_max_new_tokens=new_tokens)


def _ids(options: Options, size: int) -> dict[str, int | None]:
    names = {"bos": "bos_token_id", "start": "decoder_start_token_id"}
    return {ours: options.token(theirs, size) for ours, theirs in names.items()}


def _known(name: str, size: int, *choices: int | None) -> int:
    """The first id that is there. A family's default means nothing to a smaller vocabulary."""
    id = next((id for id in choices if id is not None), size)
    if id >= size:
        raise ModelError(f"missing key: {name}")
    return id


def read_defaults(options: Options, vocab_size: int) -> tuple[GenerationDefaults, int | None]:
    """Take the keys of a `GenerationConfig`.

    Its lengths count the decoder start, ours do not: `max_length` 20 are 19 new tokens.

    Returns:
        the defaults, and how many new tokens there are at most, or None.

    Raises:
        ModelError: a value is of the wrong kind, or beams are asked for together with sampling.
    """
    max_length = options.optional("max_length", least=2)
    max_new_tokens = options.optional("max_new_tokens", least=1)
    if max_new_tokens is None and max_length is not None:
        max_new_tokens = max_length - 1
    min_length = options.optional("min_length")
    min_new_tokens = options.optional("min_new_tokens")
    if min_new_tokens is None and min_length:
        min_new_tokens = min_length - 1
    words = options.sequences("bad_words_ids", vocab_size)
    suppressed = options.take("suppress_tokens", [])
    words += Options({"suppress_tokens": [[id] for id in suppressed]}, options.source).sequences(
        "suppress_tokens", vocab_size
    )
    defaults = GenerationDefaults(
        min_new_tokens=min_new_tokens or None,
        do_sample=options.flag("do_sample") or None,
        temperature=options.number("temperature"),
        top_k=options.optional("top_k"),
        top_p=options.number("top_p"),
        min_p=options.number("min_p"),
        typical_p=options.number("typical_p"),
        num_beams=options.optional("num_beams", least=1),
        length_penalty=options.number("length_penalty"),
        early_stopping=_early_stopping(options),
        repetition_penalty=options.number("repetition_penalty"),
        no_repeat_ngram_size=options.optional("no_repeat_ngram_size"),
        encoder_no_repeat_ngram_size=options.optional("encoder_no_repeat_ngram_size"),
        forced_bos_token_id=options.token("forced_bos_token_id", vocab_size),
        forced_eos_token_id=options.token("forced_eos_token_id", vocab_size),
        bad_words=words or None,
        renormalize_logits=options.flag("renormalize_logits") or None,
    )
    if defaults.do_sample and (defaults.num_beams or 1) > 1:
        raise ModelError(
            f"{options.prefix}num_beams {defaults.num_beams} with do_sample is not implemented"
        )
    _check_bounds(defaults, options.prefix)
    return defaults, max_new_tokens


def _check_bounds(defaults: GenerationDefaults, prefix: str) -> None:
    """What a request may not ask for, a model may not either."""
    for name, value in defaults.stated.items():
        if name in GenerationParameters.model_fields and name != "bad_words":
            try:
                GenerationParameters.model_validate({name: value})
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise ModelError(f"{prefix}{name}: {reason}, got {value!r}") from error


def _early_stopping(options: Options) -> bool | Literal["never"] | None:
    value: Any = options.take("early_stopping")
    if value not in (None, True, False, "never") or _is_int(value):
        raise ModelError(
            f'{options.prefix}early_stopping must be true, false or "never", got {value!r}'
        )
    stated: bool | Literal["never"] | None = value
    return stated


# --- tensors --------------------------------------------------------------------------------------

SHARED = "model.shared.weight"
SOURCE_TABLE = "model.encoder.embed_tokens.weight"
TARGET_TABLE = "model.decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
LOGITS_BIAS = "final_logits_bias"


@dataclass(frozen=True)
class Tables:
    """Which tensors hold the token tables and the output layer.

    A checkpoint names up to four, and holds any of those that are tied: safetensors keep one, old
    files all of them.

    Attributes:
        source, target, output: the tensors to read; equal names are one weight.
        copies: others that may be there, and the one that each must equal.
        unused: others that nothing reads; the reference has a place for them, but uses none.
    """

    source: str
    target: str
    output: str
    copies: Mapping[str, str] = field(default_factory=dict)
    unused: Collection[str] = ()

    @classmethod
    def find(cls, shapes: Shapes, *, one_vocabulary: bool, tied: bool) -> Tables:
        """Resolve them.

        Args:
            one_vocabulary: source and target share their table.
            tied: the output layer is the target's table.
        """
        if one_vocabulary and tied:
            every = (SHARED, TARGET_TABLE, SOURCE_TABLE, OUTPUT)
            kept = _first(shapes, *every)
            return cls(kept, kept, kept, {name: kept for name in every if name != kept})
        if one_vocabulary:
            source, target = (
                _first(shapes, SOURCE_TABLE, SHARED),
                _first(shapes, TARGET_TABLE, SHARED),
            )
            return cls(source, target, OUTPUT, unused={SHARED} - {source, target})
        output = _first(shapes, TARGET_TABLE, OUTPUT) if tied else OUTPUT
        target = output if tied else TARGET_TABLE
        copies = {name: target for name in (TARGET_TABLE, OUTPUT) if tied and name != target}
        return cls(SOURCE_TABLE, target, output, copies)


def ignored_tensors(
    shapes: Shapes, tables: Tables, table_shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Tensors that may be in the file and are not needed, with their shapes."""
    versions = [name for name in shapes if name in VERSIONS]
    return dict.fromkeys(tables.unused, table_shape) | {name: shapes[name] for name in versions}


VERSIONS = ("model.encoder.version", "model.decoder.version")
"""Fairseq's own version of a stack; files converted long ago still hold it."""


def _first(shapes: Shapes, *names: str) -> str:
    """The first that is there; if none is, the one that an error had best call missing."""
    return next((name for name in names if name in shapes), SHARED if SHARED in names else names[0])


def stack_names(shape: Shape) -> dict[str, str]:
    """Parameter name here -> tensor name, of all layers."""
    names: dict[str, str] = {}
    for i in range(shape.encoder_layers):
        ours, theirs = f"encoder.layers.{i}", f"model.encoder.layers.{i}"
        names |= _attention(f"{ours}.attention", f"{theirs}.self_attn")
        names |= _feed_forward(f"{ours}.feed_forward", theirs)
        names |= pair(f"{ours}.residuals.0.norm", f"{theirs}.self_attn_layer_norm")
        names |= pair(f"{ours}.residuals.1.norm", f"{theirs}.final_layer_norm")
    for i in range(shape.decoder_layers):
        ours, theirs = f"decoder.layers.{i}", f"model.decoder.layers.{i}"
        names |= _attention(f"{ours}.self_attention", f"{theirs}.self_attn")
        names |= _attention(f"{ours}.cross_attention", f"{theirs}.encoder_attn")
        names |= _feed_forward(f"{ours}.feed_forward", theirs)
        names |= pair(f"{ours}.residuals.0.norm", f"{theirs}.self_attn_layer_norm")
        names |= pair(f"{ours}.residuals.1.norm", f"{theirs}.encoder_attn_layer_norm")
        names |= pair(f"{ours}.residuals.2.norm", f"{theirs}.final_layer_norm")
    return names


def pair(ours: str, theirs: str) -> dict[str, str]:
    """Weight and bias of a module."""
    return {f"{ours}.{part}": f"{theirs}.{part}" for part in ("weight", "bias")}


def _attention(ours: str, theirs: str) -> dict[str, str]:
    letters = {"query": "q", "key": "k", "value": "v", "output": "out"}
    names: dict[str, str] = {}
    for word, letter in letters.items():
        names |= pair(f"{ours}.{word}", f"{theirs}.{letter}_proj")
    return names


def _feed_forward(ours: str, theirs: str) -> dict[str, str]:
    return pair(f"{ours}.expand", f"{theirs}.fc1") | pair(f"{ours}.contract", f"{theirs}.fc2")


def table_names(network: Transformer, tables: Tables) -> dict[str, str]:
    """Parameter name here -> tensor name, of token tables and output layer, each once."""
    names = {"encoder.embedding.tokens.weight": tables.source}
    if network.decoder.embedding.tokens is not network.encoder.embedding.tokens:
        names["decoder.embedding.tokens.weight"] = tables.target
    biased = isinstance(network.output, BiasedOutput)
    if biased:
        names["output.bias"] = LOGITS_BIAS
    if tables.output not in (tables.source, tables.target):
        names["output.projection.weight" if biased else "output.weight"] = tables.output
    return names


# --- composition ----------------------------------------------------------------------------------


def token_tables(
    tables: Tables, vocab_sizes: tuple[int, int], dim: int
) -> tuple[nn.Embedding, nn.Embedding]:
    """The source's and the target's token table, which may be one."""
    source = token_table(vocab_sizes[0], dim)
    if tables.source == tables.target:
        return source, source
    return source, token_table(vocab_sizes[1], dim)


def output_layer(shapes: Shapes, tables: Tables, target: nn.Embedding) -> nn.Module:
    """The output layer, tied to a table where `tables` says so, and biased where the file is."""
    vocab_size, dim = target.weight.shape
    projection = nn.Linear(dim, vocab_size, bias=False)
    if tables.output == tables.target:
        projection.weight = target.weight
    return BiasedOutput(projection, vocab_size) if LOGITS_BIAS in shapes else projection


def encoder_layers(shape: Shape, residual: type[PreNorm] | type[PostNorm]) -> list[EncoderLayer]:
    """All layers of the encoder, residuals taken as `residual` does."""
    dim, activation = shape.d_model, shape.activation
    return [
        EncoderLayer(
            MultiHeadAttention(dim, shape.encoder_attention_heads),
            FeedForward(dim, shape.encoder_ffn_dim, activation=activation),
            [residual(LayerNorm(dim)) for _ in range(2)],
        )
        for _ in range(shape.encoder_layers)
    ]


def decoder_layers(shape: Shape, residual: type[PreNorm] | type[PostNorm]) -> list[DecoderLayer]:
    """All layers of the decoder."""
    dim, heads, activation = shape.d_model, shape.decoder_attention_heads, shape.activation
    return [
        DecoderLayer(
            MultiHeadAttention(dim, heads),
            MultiHeadAttention(dim, heads),
            FeedForward(dim, shape.decoder_ffn_dim, activation=activation),
            [residual(LayerNorm(dim)) for _ in range(3)],
        )
        for _ in range(shape.decoder_layers)
    ]
