"""Request and response bodies: the wire contract.

The server validates with these classes and the OpenAPI document is made of them; the SDK builds
requests from them and parses answers into them.

One rule for shapes: one input gets one object, a list of inputs a list of objects in the same
order. Tagged unions (`Texts`, `Ids`, ...) keep validation to the branch that was meant, so that an
error names one place; their tags appear in error locations and are dropped from messages.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from seqserve.parameters import MANY, ONE, GenerationParameters, Strict, list_or_not

TIMEOUT_LIMIT = 86_400.0
"""Seconds; nobody waits longer."""


def _nested_or_not(value: Any) -> str:
    return MANY if isinstance(value, list) and value and isinstance(value[0], list) else ONE


# fail_fast: a list of a million wrong elements is refused for its first one.
Text = Annotated[str, Tag(ONE)]
Texts = Annotated[
    Text | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag(MANY)],
    Discriminator(list_or_not),
]
IdList = Annotated[list[int], Field(fail_fast=True)]
Ids = Annotated[
    Annotated[list[int], Field(min_length=1, fail_fast=True), Tag(ONE)]
    | Annotated[list[IdList], Field(min_length=1, fail_fast=True), Tag(MANY)],
    Discriminator(_nested_or_not),
]
Parameters = Annotated[
    Annotated[GenerationParameters, Tag(ONE)]
    | Annotated[list[GenerationParameters], Field(min_length=1, fail_fast=True), Tag(MANY)],
    Discriminator(list_or_not),
]

FinishReason = Literal["eos_token", "stop_sequence", "length"]


# --- requests ------------------------------------------------------------------------------------


class Request(Strict):
    """What every request body has in common."""

    model: str | None = Field(
        None, description="Name of the model to ask. Null: the first one that the server has."
    )


class _Inputs(Request):
    inputs: Texts | None = Field(
        None,
        description="A text, or a list of texts. Give this or `input_ids`.",
        examples=["hello", ["hello", "world"]],
    )
    input_ids: Ids | None = Field(
        None,
        description="Token ids, or a list of lists of them, taken exactly as given: no `</s>` is "
        "added. `[[]]` is one empty source.",
    )

    @model_validator(mode="after")
    def _one_kind_of_input(self) -> Self:
        if self.inputs is None and self.input_ids is None:
            raise ValueError("inputs (text) or input_ids (token ids) must be given")
        if self.inputs is not None and self.input_ids is not None:
            raise ValueError("inputs and input_ids exclude each other")
        return self

    @property
    def texts(self) -> list[str] | None:
        """The inputs as a list, if they are texts."""
        return as_list(self.inputs) if self.inputs is not None else None

    @property
    def id_lists(self) -> list[list[int]]:
        """The inputs as a list, if they are ids."""
        return as_lists(self.input_ids or [])

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list."""
        return isinstance(self.inputs, list) or _nested_or_not(self.input_ids) == MANY

    @property
    def count(self) -> int:
        """Number of inputs."""
        return len(self.texts if self.texts is not None else self.id_lists)

    def place(self, index: int) -> str:
        """How an error message calls an input: `inputs`, or `inputs[3]` in a list."""
        if self.inputs is not None:
            return f"inputs[{index}]" if isinstance(self.inputs, list) else "inputs"
        nested = _nested_or_not(self.input_ids) == MANY
        return f"input_ids[{index}]" if nested else "input_ids"


class _Run(_Inputs):
    timeout: float | None = Field(
        None,
        gt=0.0,
        le=TIMEOUT_LIMIT,
        description="Seconds after which the request fails with status 504 and its rows are freed. "
        "Null: the header `x-request-timeout`, else the server's default.",
    )


class GenerateRequest(_Run):
    """Continue each input."""

    parameters: Parameters | None = Field(
        None,
        description="How to generate: one object for all inputs, or a list with one per input.",
    )
    stream: bool | None = Field(
        None,
        description="Answer with server-sent events, one for each token; for one input only.",
    )

    @model_validator(mode="after")
    def _parameters_match(self) -> Self:
        if self.stream and self.is_list:
            raise ValueError(f"stream needs one input, got a list of {self.count}")
        if isinstance(self.parameters, list) and len(self.parameters) != self.count:
            raise ValueError(
                f"parameters has {len(self.parameters)} entries, but there are {self.count} inputs"
            )
        return self

    def parameters_of(self, index: int) -> GenerationParameters:
        """The parameters of one input."""
        if isinstance(self.parameters, list):
            return self.parameters[index]
        return self.parameters or GenerationParameters()

    def parameters_place(self, index: int) -> str:
        """How an error message calls the parameters of one input."""
        return f"parameters[{index}]" if isinstance(self.parameters, list) else "parameters"


class _Inspected(_Run):
    src_lang: Texts | None = Field(
        None,
        description="Language of the source texts, as the model calls it: one for all inputs, or a "
        "list with one per input. Null: the model's default.",
    )
    tgt_lang: Texts | None = Field(
        None,
        description="Language of the targets: one for all, or a list with one per answer; its "
        "token is put before a target text, also before none. Null: the model's default where "
        "there is a text.",
    )

    @property
    def answers(self) -> int:
        """Number of answers."""
        return self.count

    def _check_languages(self) -> None:
        for name, value, count in (
            ("src_lang", self.src_lang, self.count),
            ("tgt_lang", self.tgt_lang, self.answers),
        ):
            if isinstance(value, list) and len(value) != count:
                what = "inputs" if name == "src_lang" else "answers"
                raise ValueError(f"{name} has {len(value)} entries, but there are {count} {what}")


class _Targets(_Inspected):
    targets: Texts | None = Field(
        None,
        description="Target texts: one for each input, or several for one input, which is then "
        "encoded once. No `</s>` is added. Null: the decoder start alone.",
        examples=["HH AH", ["HH AH", "HH EH"]],
    )
    target_ids: Ids | None = Field(
        None, description="The same as token ids, behind the decoder start. Not with `targets`."
    )

    @model_validator(mode="after")
    def _targets_match(self) -> Self:
        if self.targets is not None and self.target_ids is not None:
            raise ValueError("targets and target_ids exclude each other")
        count = self.target_count
        if count is not None and count != self.count and self.count != 1:
            raise ValueError(
                f"{self.targets_name} must pair up with the inputs: {count} targets, "
                f"{self.count} inputs"
            )
        self._check_languages()
        return self

    @property
    def answers(self) -> int:
        """Number of answers."""
        return max(self.count, self.target_count or 0)

    @property
    def targets_name(self) -> str:
        """The field that holds the targets."""
        return "targets" if self.targets is not None else "target_ids"

    @property
    def target_texts(self) -> list[str] | None:
        """The targets as a list, if they are texts."""
        return as_list(self.targets) if self.targets is not None else None

    @property
    def target_id_lists(self) -> list[list[int]] | None:
        """The targets as a list, if they are ids."""
        return as_lists(self.target_ids) if self.target_ids is not None else None

    @property
    def target_count(self) -> int | None:
        """Number of targets, None where none were given."""
        targets = self.target_texts if self.targets is not None else self.target_id_lists
        return None if targets is None else len(targets)

    @property
    def targets_are_list(self) -> bool:
        """Whether there is a list of targets."""
        return isinstance(self.targets, list) or _nested_or_not(self.target_ids) == MANY

    def target_place(self, index: int) -> str:
        """How an error message calls a target: `targets`, or `targets[3]` in a list."""
        return f"{self.targets_name}[{index}]" if self.targets_are_list else self.targets_name

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list: of inputs, or of several targets for one input."""
        return super().is_list or self.targets_are_list


Format = Annotated[
    Literal["json", "safetensors"] | None,
    Field(
        description="Null: JSON, or safetensors where the `Accept` header asks for "
        "`application/octet-stream`."
    ),
]


class LogitsRequest(_Targets):
    """Teacher-forced logits: one masked forward pass over the decoder start and the targets."""

    positions: Literal["last", "all"] = Field(
        "last", description="Logits behind the last target token only, or behind every one."
    )
    top_k: int | None = Field(
        None, ge=1, description="Return the k largest logits and their ids instead of all logits."
    )
    format: Format = None


class ScoreRequest(_Targets):
    """How likely the model finds given targets: one masked forward pass over each."""

    targets: Texts | None = Field(
        None,
        description="Target texts: one for each input, or several for one input, which is then "
        "encoded once. The `</s>` that the tokenizer puts behind a text is scored too.",
        examples=["HH AH L OW", ["HH AH L OW", "HH EH L OW"]],
    )
    target_ids: Ids | None = Field(
        None,
        description="The same as token ids, scored exactly as given: without the decoder start, "
        "with `</s>` if it is to be scored. Not with `targets`.",
    )


class AttentionRequest(_Targets):
    """Attention weights of one masked forward pass over the decoder start and the targets."""

    dtype: Literal["float32", "float16"] = Field(
        "float32", description="Number format of the answer; float16 has half the digits."
    )
    format: Format = None


class NextRequest(_Inspected):
    """The likeliest next tokens."""

    target_prefix: Texts | None = Field(
        None,
        description="Text that the target starts with: one for all inputs, a list with one per "
        "input, or several for one input, which is then encoded once.",
        examples=["HH", ["HH", "HH AH"]],
    )
    target_prefix_ids: Ids | None = Field(
        None, description="The same as token ids. Not with `target_prefix`."
    )
    top_k: int = Field(10, ge=1, description="How many tokens to return.")

    @model_validator(mode="after")
    def _prefixes_match(self) -> Self:
        if self.target_prefix is not None and self.target_prefix_ids is not None:
            raise ValueError("target_prefix and target_prefix_ids exclude each other")
        if self.count != 1 and self.prefix_count not in (0, 1, self.count):
            raise ValueError(
                f"{self.prefix_name} has {self.prefix_count} entries, but there are {self.count} "
                "inputs"
            )
        self._check_languages()
        return self

    @property
    def answers(self) -> int:
        """Number of answers."""
        return max(self.count, self.prefix_count)

    @property
    def prefix_name(self) -> str:
        """The field that holds the prefixes."""
        return "target_prefix_ids" if self.target_prefix_ids is not None else "target_prefix"

    @property
    def prefix_count(self) -> int:
        """Number of prefixes, 0 where none were given."""
        if self.target_prefix is not None:
            return len(as_list(self.target_prefix))
        return 0 if self.target_prefix_ids is None else len(as_lists(self.target_prefix_ids))

    @property
    def prefixes_are_list(self) -> bool:
        """Whether there is a list of prefixes."""
        nested = _nested_or_not(self.target_prefix_ids) == MANY
        return isinstance(self.target_prefix, list) or nested

    def prefix_place(self, index: int) -> str:
        """How an error message calls a prefix: `target_prefix`, or `target_prefix[3]` in a list."""
        return f"{self.prefix_name}[{index}]" if self.prefixes_are_list else self.prefix_name

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list: of inputs, or of several prefixes of one input."""
        return super().is_list or self.prefixes_are_list


class TokenizeRequest(Request):
    """Texts to token ids."""

    inputs: Texts = Field(description="A text, or a list of texts.")
    side: Literal["source", "target"] = Field(
        "source", description="Whose vocabulary: the encoder's or the decoder's."
    )
    src_lang: str | None = Field(
        None, description="Language of source texts. Null: the model's default."
    )
    tgt_lang: str | None = Field(
        None, description="Language of target texts. Null: the model's default."
    )


class DetokenizeRequest(Request):
    """Token ids to texts."""

    input_ids: Ids = Field(description="Token ids, or a list of lists of them.")
    side: Literal["source", "target"] = Field(
        "target", description="Whose vocabulary: the encoder's or the decoder's."
    )


def as_list(value: str | list[str]) -> list[str]:
    """One text as a list of one."""
    return value if isinstance(value, list) else [value]


def as_lists(value: list[int] | list[list[int]]) -> list[list[int]]:
    """One list of ids as a list of one."""
    if _nested_or_not(value) == MANY:
        return value  # type: ignore[return-value]
    return [value]  # type: ignore[list-item]


# --- answers -------------------------------------------------------------------------------------


class Answer(BaseModel):
    """What every answer has in common. A client reads on where a newer server says more."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Token(Answer):
    """A token of a target."""

    id: int
    text: str | None = Field(
        description="What the token adds to the text, or the vocabulary's name of a special token. "
        "The texts of all tokens that are not special concatenate to exactly the generated text. "
        "Null without a tokenizer."
    )
    logprob: float | None = Field(
        description="Log-softmax of the model's raw logits; null where it is not finite."
    )
    special: bool = Field(description="Whether it is a control token that adds no text.")


class BeamToken(Answer):
    """What a step of a beam search added to a hypothesis."""

    parent: int = Field(
        description="The hypothesis it goes on from: its place among the live ones of the step "
        "before, from 0."
    )
    token: Token
    score: float | None = Field(
        description="Of the hypothesis with the token, length-penalised; null where not finite."
    )
    finished: bool = Field(description="Whether the hypothesis ended here; others live on.")


class Details(Answer):
    """How an answer came about."""

    finish_reason: FinishReason = Field(
        description="`eos_token`: the model ended it; `stop_sequence`: one of `stop` did; "
        "`length`: it reached its limit."
    )
    input_tokens: int = Field(description="Source tokens, `</s>` included, after truncation.")
    unknown_tokens: int = Field(description="How many of them are `<unk>`.")
    truncated: bool = Field(description="Whether `truncate` cut the source.")
    generated_tokens: int = Field(description="Generated tokens, `</s>` included.")
    seed: int | None = Field(description="What the draws were made with; null without sampling.")
    score: float | None = Field(
        None, description="Of a beam search: its length-penalised score. Null: none took place."
    )
    prefill: list[Token] = Field(description="Always empty; for clients of other servers.")
    tokens: list[Token] = Field(
        description="The generated tokens; in a stream only where details were asked for."
    )
    top_tokens: list[list[Token]] | None = Field(
        None, description="With `top_n_tokens`: the likeliest tokens of each step, best first."
    )
    beam_steps: list[list[BeamToken]] | None = Field(
        None,
        description="With `beam_steps`, of the best sequence: for each step the live hypotheses, "
        "then those that it finished, both best first.",
    )
    queue_time: float | None = Field(
        None, description="In a stream, where headers have gone: milliseconds in the queue."
    )
    inference_time: float | None = Field(
        None, description="In a stream: milliseconds in the engine."
    )
    input_length: int | None = Field(
        None, description="In a stream: `input_tokens`, for clients of text-generation-inference."
    )


class Generated(Answer):
    """One of several continuations of an input."""

    generated_text: str | None = Field(description="Null where the model has no tokenizer.")
    score: float | None = Field(None, description="Of a beam search; null without one.")
    details: Details | None = Field(None, description="With `parameters.details`.")


class GenerateResponse(Answer):
    """One input's continuation, the best where there are several."""

    generated_text: str | None = Field(description="Null where the model has no tokenizer.")
    sequences: list[Generated] | None = Field(
        None, description="With `num_return_sequences` above 1: all of them, best first."
    )
    details: Details | None = Field(None, description="With `parameters.details`.")


class StreamEvent(Answer):
    """One event of a stream: a token."""

    index: int = Field(description="Of the token in its sequence, from 0.")
    sequence: int = Field(description="Which of several continuations it belongs to, from 0.")
    token: Token | None = Field(
        description="Null only in the one event of an input without anything to generate."
    )
    top_tokens: list[Token] | None = Field(None, description="With `top_n_tokens`.")
    generated_text: str | None = Field(
        None, description="The whole text, with a sequence's last token."
    )
    details: Details | None = Field(None, description="With a sequence's last token.")


class LogitsResponse(Answer):
    """Teacher-forced logits of one target. -infinity and NaN are null."""

    target_ids: list[int] = Field(
        description="What the decoder was fed, decoder start included: the logits of a position "
        "are those of the token after it."
    )
    logits: list[float | None] | list[list[float | None]] | None = Field(
        None, description="`[vocabulary]` for `last`, `[position][vocabulary]` for `all`."
    )
    ids: list[int] | list[list[int]] | None = Field(
        None, description="With `top_k`: ids of the largest logits, in falling order."
    )
    values: list[float | None] | list[list[float | None]] | None = Field(
        None, description="With `top_k`: those logits."
    )


class ScoreResponse(Answer):
    """How likely the model finds one target, in nats."""

    tokens: list[Token] = Field(description="The target's tokens, in order, `</s>` among them.")
    logprob_sum: float | None = Field(
        description="Of the tokens' log-probabilities; null where one of them is."
    )
    logprob_mean: float | None = Field(description="Per token.")
    perplexity: float | None = Field(
        description="`exp(-logprob_mean)`; null where that is no finite float32."
    )


Maps = list[list[list[list[float | None]]]]


class AttentionResponse(Answer):
    """Attention weights of one source and target, without padding; each row sums to 1."""

    source_tokens: list[str | None] | None = Field(
        description="The vocabulary's names of what the encoder was fed. Null without a tokenizer."
    )
    target_tokens: list[str | None] | None = Field(
        description="The same of the decoder, decoder start included."
    )
    source_ids: list[int]
    target_ids: list[int]
    encoder: Maps = Field(description="`[layer][head][source query][source key]`.")
    decoder: Maps = Field(
        description="`[layer][head][target query][target key]`; 0 where the key comes later."
    )
    cross: Maps = Field(description="`[layer][head][target query][source key]`.")


class NextToken(Answer):
    """A candidate for the next token."""

    id: int
    text: str | None = Field(description="The vocabulary's name of it; null without a tokenizer.")
    logit: float | None
    logprob: float | None = Field(description="Log-softmax over the whole vocabulary.")


class NextResponse(Answer):
    """The likeliest next tokens of one input, best first."""

    tokens: list[NextToken]


class TokenizeResponse(Answer):
    """The tokens of one text."""

    ids: list[int]
    tokens: list[str] = Field(description="The vocabulary's names of the ids.")


class DetokenizeResponse(Answer):
    """The text of one list of ids, special tokens left out."""

    text: str


class ErrorResponse(Answer):
    """The one envelope of all errors."""

    error: str = Field(description="What is wrong, for a person.")
    error_type: str = Field(description="The kind of error, for a program.")
    param: str | None = Field(description="The field at fault, where there is one.")
    request_id: str | None = Field(description="As in the header `x-request-id`.")


class StatusResponse(Answer):
    """A probe's answer."""

    status: str


class Batches(Answer):
    """How full the engine's steps were, since the model was loaded."""

    steps: int = Field(description="Decoder steps that had at least one row.")
    mean_rows: float = Field(description="Rows per step on average.")
    max_rows: int = Field(description="The fullest step.")
    histogram: dict[int, int] = Field(description="Rows in a step -> number of such steps.")
    forward_passes: int = Field(
        description="Teacher-forced passes (/logits, /next, /score, /attention) run."
    )


class EncoderCacheInfo(Answer):
    """Encoder outputs kept for sources that come again."""

    hits: int = Field(description="Sources that did not have to be encoded again.")
    misses: int = Field(description="Sources that had to be encoded.")
    bytes: int = Field(description="Memory in use.")
    max_bytes: int = Field(description="At most; 0: off.")


class ModelInfo(Answer):
    """One model of the server."""

    name: str
    state: Literal["loading", "ready", "failed", "draining"] = Field(
        description="`loading` also while its engine is being restarted."
    )
    error: str | None = Field(None, description="Why it failed to load.")
    family: str | None = None
    device: str | None = None
    dtype: str | None = None
    parameters: int | None = Field(None, description="Number of weights.")
    src_vocab_size: int | None = None
    tgt_vocab_size: int | None = None
    max_source_tokens: int | None = Field(None, description="`</s>` included.")
    max_target_tokens: int | None = Field(
        None, description="Decoder positions: decoder start, target prefix and generated tokens."
    )
    default_max_new_tokens: int | None = None
    generation_defaults: dict[str, Any] | None = Field(
        None, description="What the model asks for where a request says nothing."
    )
    tasks: dict[str, dict[str, Any]] | None = Field(
        None,
        description="Tasks that `task` may name, with the defaults and the prefix of each; empty "
        "without tasks.",
    )
    default_decoding: Literal["greedy", "beam_search", "sampling"] | None = Field(
        None, description="How tokens are picked where a request says nothing."
    )
    decoder_start_ids: list[int] | None = Field(
        None, description="What every target begins with, before any prefix or forced token."
    )
    eos_token_id: int | None = Field(
        None, description="The first of `eos_token_ids`; null where only length ends a target."
    )
    eos_token_ids: list[int] | None = Field(
        None, description="Any of them ends a target that is generated."
    )
    cache_bytes_per_source_token: int | None = Field(
        None,
        description="Of cross-attention's keys and values and the encoder's output, in the "
        "model's dtype. Absent, as below, where nothing can be kept.",
    )
    cache_bytes_per_target_token: int | None = Field(
        None, description="Of self-attention's keys and values, for each row (each beam, draw)."
    )
    cache_bytes_per_request: int | None = Field(
        None, description="Of one row with the longest source and target."
    )
    languages: list[str] | None = Field(
        None, description="Codes that `src_lang` and `tgt_lang` may have; empty without languages."
    )
    default_src_lang: str | None = Field(None, description="Null: a request has to name it.")
    default_tgt_lang: str | None = Field(None, description="Null: a request has to name it.")
    source_is_target: bool | None = Field(
        None, description="Whether /generate continues the source itself."
    )
    source_tokenizer: bool | None = Field(None, description="Whether texts are accepted.")
    target_tokenizer: bool | None = Field(None, description="Whether texts are returned.")
    waiting: int | None = Field(None, description="Sequences and passes not yet begun.")
    running: int | None = Field(None, description="Rows being decoded.")
    restarts: int | None = Field(None, description="How often its engine broke down and came back.")
    batches: Batches | None = None
    encoder_cache: EncoderCacheInfo | None = Field(
        None, description="Null where nothing can be kept, as each new token changes the source."
    )


class Limits(Answer):
    """What one request may ask for."""

    max_body_bytes: int
    max_inputs: int
    max_characters: int
    max_beams: int
    max_return_sequences: int
    max_queue: int
    max_queue_tokens: int
    max_rows: int
    max_json_values: int
    max_tensor_values: int
    default_timeout: float


class EndpointInfo(Answer):
    """What clients of text-generation-inference read of the first model."""

    model_id: str | None = Field(None, description="Its name.")
    model_sha: str | None = Field(None, description="Always null.")
    model_dtype: str | None = Field(None, description="Absent, as below, until it is loaded.")
    model_device_type: str | None = None
    model_pipeline_tag: str | None = None
    max_concurrent_requests: int | None = Field(None, description="`limits.max_queue`.")
    max_best_of: int | None = Field(None, description="`limits.max_return_sequences`.")
    max_stop_sequences: int | None = None
    max_input_tokens: int | None = Field(None, description="Its `max_source_tokens`.")
    max_total_tokens: int | None = Field(None, description="Source and target together.")
    max_client_batch_size: int | None = Field(None, description="`limits.max_inputs`.")
    validation_workers: int | None = None
    router: str | None = None
    sha: str | None = Field(None, description="Always null, as is `docker_label`.")
    docker_label: str | None = None


class InfoResponse(EndpointInfo):
    """The server and its models; the first one answers requests that name none."""

    version: str
    torch: str | None
    limits: Limits
    models: list[ModelInfo]
