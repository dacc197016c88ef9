"""What callers send: calls drawn from a seed, mixed over all endpoints and manners.

A soak asks a limited number of different *questions* over and over, each time in other company and
in another manner, so that every answer can be compared with one that was computed alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from seqserve.schemas import Limits, ModelInfo
from tests.builders import LETTERS, SOUNDS

ACCEPT_TENSORS = ("accept", "application/octet-stream")

ENDLESS = 64
"""Target positions from which a model can keep a caller waiting long enough to be left."""

CALM, RUSH = 300, 150
"""Calls of a wave that the server can take, and of one that overflows its queue."""


@dataclass(frozen=True)
class Question:
    """What is asked, apart from the manner of asking.

    Attributes:
        kind: the row of the report that it belongs to.
    """

    kind: str
    path: str
    body: dict[str, Any]
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def streamed(self) -> bool:
        return self.path == "/generate_stream" or bool(self.body.get("stream"))

    @property
    def encoded(self) -> bytes:
        return json.dumps(self.body).encode()

    @property
    def key(self) -> str:
        """The same for the same question."""
        return json.dumps([self.path, self.body, self.headers], sort_keys=True)


@dataclass(frozen=True)
class Manner:
    """How a caller behaves.

    Attributes:
        leaves_after: seconds until it closes the connection; None: it waits for its answer.
        leaves_at_event: it closes the connection behind so many events of a stream.
        sends: share of the body that it sends.
    """

    leaves_after: float | None = None
    leaves_at_event: int | None = None
    sends: float = 1.0

    @property
    def stays(self) -> bool:
        return self.leaves_after is None and self.leaves_at_event is None


@dataclass(frozen=True)
class Call:
    """One request.

    Attributes:
        statuses: what it may be answered with.
        param: the field that an error must name.
        question: what an answer of status 200 answers.
        compared: whether such an answer is compared with the one computed alone.
        timeout: seconds, where the call names a deadline of its own.
    """

    number: int
    kind: str
    method: str
    path: str
    statuses: frozenset[int]
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    manner: Manner = Manner()
    param: str | None = None
    question: Question | None = None
    compared: bool = False
    timeout: float | None = None

    @property
    def request_id(self) -> str:
        return f"soak-{self.number}"


@dataclass(frozen=True)
class Wave:
    """Calls made by callers of a number that does not change."""

    calls: Sequence[Call]
    callers: int


@dataclass
class Draw:
    """Random pieces of requests for one model."""

    rng: random.Random
    model: ModelInfo
    limits: Limits

    @property
    def longest_word(self) -> int:
        assert self.model.max_source_tokens
        return min(14, self.model.max_source_tokens - 1)

    def word(self) -> str:
        """Mostly plain; some have characters that are folded, or unknown."""
        letters = LETTERS if self.rng.random() < 0.9 else LETTERS + "ÉÀ ß-7"
        return "".join(self.rng.choices(letters, k=self.rng.randint(1, self.longest_word)))

    def sounds(self, most: int = 4) -> str:
        return " ".join(self.rng.choices(SOUNDS.split(), k=self.rng.randint(1, most)))

    def source(self) -> dict[str, Any]:
        """A text, or now and then ids."""
        if self.rng.random() < 0.8:
            return {"inputs": self.word()}
        assert self.model.src_vocab_size
        length = self.rng.randint(1, self.longest_word)
        return {
            "input_ids": [self.rng.randrange(4, self.model.src_vocab_size) for _ in range(length)]
        }

    def target_ids(self, most: int = 8) -> list[int]:
        assert self.model.tgt_vocab_size
        length = self.rng.randint(1, most)
        return [self.rng.randrange(4, self.model.tgt_vocab_size) for _ in range(length)]

    def seed(self) -> int:
        return self.rng.randrange(2**53)

    def sampling(self) -> dict[str, Any]:
        """Parameters of a draw but for its seed."""
        rng = self.rng
        drawn: dict[str, Any] = {"temperature": round(rng.uniform(0.5, 1.5), 2)}
        for name, low, high in (("top_p", 0.5, 1.0), ("min_p", 0.0, 0.1), ("typical_p", 0.5, 1.0)):
            if rng.random() < 0.4:
                drawn[name] = round(rng.uniform(low, high), 3)
        if rng.random() < 0.4:
            drawn["top_k"] = rng.randint(1, 30)
        return drawn


# --- questions -----------------------------------------------------------------------------------


def _generate(draw: Draw, **parameters: Any) -> tuple[str, dict[str, Any]]:
    if draw.rng.random() < 0.2:
        parameters["top_n_tokens"] = draw.rng.randint(1, 5)
    return "/generate", {**draw.source(), "parameters": {"details": True, **parameters}}


def greedy(draw: Draw) -> tuple[str, dict[str, Any]]:
    return _generate(draw, max_new_tokens=draw.rng.randint(1, 20))


def sampled(draw: Draw) -> tuple[str, dict[str, Any]]:
    return _generate(draw, seed=draw.seed(), **draw.sampling())


def unseeded(draw: Draw) -> tuple[str, dict[str, Any]]:
    """The server draws the seed, and says which."""
    return _generate(draw, do_sample=True, **draw.sampling())


def several(draw: Draw) -> tuple[str, dict[str, Any]]:
    return _generate(
        draw, seed=draw.seed(), num_return_sequences=draw.rng.randint(2, 4), **draw.sampling()
    )


def beams(draw: Draw) -> tuple[str, dict[str, Any]]:
    width = draw.rng.randint(2, 5)
    return _generate(
        draw,
        num_beams=width,
        num_return_sequences=draw.rng.choice([1, width]),
        length_penalty=draw.rng.choice([0.5, 1.0, 2.0]),
        early_stopping=draw.rng.choice([True, False, "never"]),
        max_new_tokens=draw.rng.randint(4, 20),
    )


def penalized(draw: Draw) -> tuple[str, dict[str, Any]]:
    rng = draw.rng
    wishes: dict[str, Any] = {
        "repetition_penalty": round(rng.uniform(0.8, 1.5), 2),
        "frequency_penalty": round(rng.uniform(-1.0, 1.0), 2),
        "presence_penalty": round(rng.uniform(-1.0, 1.0), 2),
        "no_repeat_ngram_size": rng.randint(2, 3),
        "encoder_no_repeat_ngram_size": rng.randint(2, 3),
        "bad_words": [draw.target_ids(2)],
        "logit_bias": {str(id): rng.choice([-5.0, 5.0]) for id in draw.target_ids(3)},
        "min_new_tokens": rng.randint(1, 10),
    }
    chosen = rng.sample(sorted(wishes), k=rng.randint(1, 4))
    return _generate(draw, **{name: wishes[name] for name in chosen})


def stopped(draw: Draw) -> tuple[str, dict[str, Any]]:
    return _generate(draw, stop=[draw.sounds(1) for _ in range(draw.rng.randint(1, 4))])


def prefixed(draw: Draw) -> tuple[str, dict[str, Any]]:
    return _generate(
        draw,
        target_prefix=draw.sounds(),
        return_full_text=draw.rng.random() < 0.5,
        max_new_tokens=draw.rng.randint(1, 12),
    )


def listed(draw: Draw, most: int = 6) -> tuple[str, dict[str, Any]]:
    """Inputs of any lengths, an empty one among them now and then."""
    rng = draw.rng
    words = [draw.word() if rng.random() < 0.97 else "" for _ in range(rng.randint(2, most))]
    parameters: Any = {"details": True}
    if rng.random() < 0.5:
        parameters = [{"details": True, "seed": draw.seed(), **draw.sampling()} for _ in words]
    return "/generate", {"inputs": words, "parameters": parameters}


def long(draw: Draw) -> tuple[str, dict[str, Any]]:
    """As many tokens as the model has room for."""
    assert draw.model.max_target_tokens
    least = min(draw.rng.randint(10, 120), draw.model.max_target_tokens - 2)
    return _generate(draw, min_new_tokens=least, seed=draw.seed(), temperature=1.0)


def logits(draw: Draw) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {**draw.source(), "positions": draw.rng.choice(["last", "all"])}
    if draw.rng.random() < 0.7:
        body["targets"] = draw.sounds()
    if draw.rng.random() < 0.4:
        body["top_k"] = draw.rng.randint(1, 10)
    return "/logits", body


def logits_of_many(draw: Draw) -> tuple[str, dict[str, Any]]:
    words = [draw.word() for _ in range(draw.rng.randint(2, 5))]
    targets = [draw.sounds() for _ in words]
    return "/logits", {
        "inputs": words,
        "targets": targets,
        "positions": draw.rng.choice(["last", "all"]),
        "format": "safetensors",
    }


def next_tokens(draw: Draw) -> tuple[str, dict[str, Any]]:
    prefixes: Any = draw.sounds()
    if draw.rng.random() < 0.4:
        prefixes = [draw.sounds() for _ in range(draw.rng.randint(2, 4))]
    return "/next", {**draw.source(), "target_prefix": prefixes, "top_k": draw.rng.randint(1, 12)}


def score(draw: Draw) -> tuple[str, dict[str, Any]]:
    if draw.rng.random() < 0.5:
        return "/score", {**draw.source(), "target_ids": draw.target_ids()}
    targets = [draw.sounds() for _ in range(draw.rng.randint(2, 4))]
    return "/score", {"inputs": draw.word(), "targets": targets}


def attention(draw: Draw) -> tuple[str, dict[str, Any]]:
    return "/attention", {
        "inputs": draw.word()[:5],
        "targets": draw.sounds(3),
        "format": draw.rng.choice(["json", "safetensors"]),
    }


def tokenize(draw: Draw) -> tuple[str, dict[str, Any]]:
    if draw.rng.random() < 0.5:
        return "/tokenize", {"inputs": [draw.word() for _ in range(draw.rng.randint(1, 20))]}
    return "/tokenize", {"inputs": draw.sounds(), "side": "target"}


def detokenize(draw: Draw) -> tuple[str, dict[str, Any]]:
    return "/detokenize", {"input_ids": [draw.target_ids() for _ in range(draw.rng.randint(1, 8))]}


QUESTIONS: dict[str, tuple[int, Callable[[Draw], tuple[str, dict[str, Any]]]]] = {
    "greedy": (12, greedy),
    "sampling": (10, sampled),
    "sampling, seed drawn": (1, unseeded),
    "several sequences": (5, several),
    "beams": (6, beams),
    "penalties": (7, penalized),
    "stop strings": (5, stopped),
    "target prefix": (5, prefixed),
    "list of inputs": (6, listed),
    "long answer": (2, long),
    "logits": (5, logits),
    "logits, safetensors": (3, logits_of_many),
    "next": (6, next_tokens),
    "score": (6, score),
    "attention": (4, attention),
    "tokenize": (4, tokenize),
    "detokenize": (4, detokenize),
}
"""Kind -> how often, and how one is drawn."""

IN_ONE_PIECE = {"list of inputs"}
"""Kinds of /generate that cannot be streamed."""


# --- what is refused -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A request that must be refused.

    Attributes:
        param: the field that the error names.
    """

    status: int
    param: str | None
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()


def refusals(draw: Draw) -> list[Refusal]:
    """One of each kind of bad row, path and body."""
    assert draw.model.max_source_tokens
    assert draw.model.src_vocab_size
    name = draw.model.name
    word, too_long = draw.word(), "a" * (draw.model.max_source_tokens + draw.rng.randint(0, 9))

    def asked(**fields: Any) -> bytes:
        return json.dumps({"model": name, **fields}).encode()

    def bad(param: str, path: str = "/generate", **fields: Any) -> Refusal:
        return Refusal(422, param, path, asked(**fields))

    return [
        Refusal(400, None, "/generate", b'{"inputs": "' + word.encode()),
        Refusal(400, None, "/score", b'{"inputs": "a", "timeout": NaN}'),
        Refusal(400, None, "/tokenize", b'{"inputs": "\\ud800"}'),
        Refusal(404, "model", "/next", json.dumps({"model": "none", "inputs": word}).encode()),
        Refusal(404, None, "/nowhere", asked(inputs=word)),
        Refusal(405, None, "/generate", method="GET"),
        Refusal(413, None, "/generate", asked(inputs="a" * draw.limits.max_body_bytes)),
        Refusal(
            422,
            "x-request-timeout",
            "/generate",
            asked(inputs=word),
            headers=(("x-request-timeout", "soon"),),
        ),
        bad("inputs", inputs=too_long),
        bad("inputs", "/logits", inputs=too_long),
        bad("inputs[1]", inputs=[word, too_long, word]),
        bad("inputs", inputs=5),
        bad("inputs", inputs=["a"] * (draw.limits.max_inputs + 1)),
        bad("input_ids[0][1]", input_ids=[[4, draw.model.src_vocab_size], [4]]),
        bad("input_ids[0]", "/attention", input_ids=[10**9]),
        bad("target_ids[0]", "/score", inputs=word, target_ids=[-1]),
        bad("temprature", inputs=word, temprature=1.0),
        bad("parameters.temprature", inputs=word, parameters={"temprature": 1.0}),
        bad("parameters.top_p", inputs=word, parameters={"top_p": 1.5}),
        bad("parameters[1].seed", inputs=[word, word], parameters=[{}, {"seed": -1}]),
        bad("parameters.max_new_tokens", inputs=word, parameters={"max_new_tokens": 10**6}),
        bad("top_k", "/next", inputs=word, top_k=0),
    ]


# --- calls ---------------------------------------------------------------------------------------


PROBES = ("/health", "/ready", "/info")

RUNS = {"/generate", "/generate_stream", "/logits", "/next", "/score", "/attention"}
"""Paths whose requests take places in the queue."""


@dataclass
class Traffic:
    """All calls of a soak, drawn from a seed.

    Args:
        requests: how many calls.
        models: those of the server, from /info.
        calm, rush: callers of a wave that the server can take, and of one that overflows its queue.
    """

    seed: int
    requests: int
    models: Sequence[ModelInfo]
    limits: Limits
    calm: int = 12
    rush: int = 160
    _rng: random.Random = field(init=False)
    _questions: list[Question] = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._questions = [self._question() for _ in range(max(60, self.requests // 10))]

    def waves(self) -> Iterator[Wave]:
        """Calm and rush by turns."""
        number, rushing = 0, False
        while number < self.requests:
            size = min(RUSH if rushing else CALM, self.requests - number)
            calls = [self._call(number + i, rushing) for i in range(size)]
            yield Wave(calls, self.rush if rushing else self.calm)
            number, rushing = number + size, not rushing

    def plain_calls(self) -> Iterator[Call]:
        """Questions by callers who wait, for ever."""
        return (
            self._asked(number, self._rng.choice(self._questions), rushing=False)
            for number in count()
        )

    def _draw(self) -> Draw:
        return Draw(self._rng, self._rng.choice(list(self.models)), self.limits)

    def _question(self) -> Question:
        rng, draw = self._rng, self._draw()
        weights = [weight for weight, _ in QUESTIONS.values()]
        [kind] = rng.choices(list(QUESTIONS), weights)
        path, body = QUESTIONS[kind][1](draw)
        body = {"model": draw.model.name, **body}
        headers: tuple[tuple[str, str], ...] = ()
        if path == "/generate" and kind not in IN_ONE_PIECE and rng.random() < 0.35:
            if rng.random() < 0.5:
                path = "/generate_stream"
            else:
                body["stream"] = True
        if path == "/logits" and "format" not in body and rng.random() < 0.3:
            headers = (ACCEPT_TENSORS,)
        return Question(kind, path, body, headers)

    def _call(self, number: int, rushing: bool) -> Call:
        share = self._rng.random()
        if share < 0.06:
            return self._probe(number)
        if share < 0.14:
            return self._refused(number)
        if share < 0.19:
            return self._hurried(number, rushing)
        if share < 0.27:
            return self._left(number, rushing)
        if rushing and share < 0.45:
            return self._bulk(number)
        return self._asked(number, self._rng.choice(self._questions), rushing)

    def _asked(self, number: int, question: Question, rushing: bool, **changes: Any) -> Call:
        """A question, by a caller who waits."""
        allowed = {200, 429} if rushing and question.path in RUNS else {200}
        settings: dict[str, Any] = {
            "kind": question.kind + ", streamed" * question.streamed,
            "statuses": frozenset(allowed),
            "body": question.encoded,
            "headers": question.headers,
            "question": question,
            "compared": True,
            **changes,
        }
        return Call(number, method="POST", path=question.path, **settings)

    def _probe(self, number: int) -> Call:
        path = self._rng.choice(PROBES)
        return Call(number, path.strip("/"), "GET", path, frozenset({200}))

    def _refused(self, number: int) -> Call:
        bad = self._rng.choice(refusals(self._draw()))
        return Call(
            number,
            f"refused with {bad.status}",
            bad.method,
            bad.path,
            frozenset({bad.status}),
            bad.body,
            bad.headers,
            param=bad.param,
        )

    def _bulk(self, number: int) -> Call:
        """A list that takes a good part of the queue."""
        draw = self._draw()
        words = [draw.word() for _ in range(self._rng.randint(10, 40))]
        body = {"model": draw.model.name, "inputs": words}
        path = self._rng.choice(["/generate", "/next"])
        return self._asked(number, Question("bulk list", path, body), True, compared=False)

    def _slow(self, **fields: Any) -> Question:
        """A question that takes a while, with further fields."""
        lasting = [m for m in self.models if (m.max_target_tokens or 0) >= ENDLESS] or self.models
        draw = Draw(self._rng, self._rng.choice(list(lasting)), self.limits)
        path, body = long(draw)
        stream = self._rng.random() < 0.5
        body = {"model": draw.model.name, **body, "stream": stream, **fields}
        return Question("slow", path, body)

    def _hurried(self, number: int, rushing: bool) -> Call:
        """A call with a deadline that it may or may not meet."""
        timeout = round(self._rng.uniform(0.001, 0.2), 4)
        if self._rng.random() < 0.5:
            question, headers = self._slow(timeout=timeout), ()
        else:
            question, headers = self._slow(), (("x-request-timeout", str(timeout)),)
        allowed = frozenset({200, 504, 429} if rushing else {200, 504})
        return self._asked(
            number,
            question,
            rushing,
            kind="with a deadline",
            statuses=allowed,
            headers=headers,
            compared=False,
            timeout=timeout,
        )

    def _left(self, number: int, rushing: bool) -> Call:
        """A call whose caller goes away: at once, while it runs, amid its stream or its body."""
        rng = self._rng
        where = rng.choice(["queued", "running", "streaming", "sending"])
        question = self._slow(stream=True) if where == "streaming" else self._slow()
        if where == "streaming":
            manner = Manner(leaves_at_event=rng.randint(1, 12))
        elif where == "sending":
            manner = Manner(leaves_after=rng.uniform(0.0, 0.05), sends=rng.uniform(0.0, 0.9))
        else:
            manner = Manner(leaves_after=0.0 if where == "queued" else rng.uniform(0.005, 0.3))
        return self._asked(
            number, question, rushing, kind=f"left while {where}", manner=manner, compared=False
        )
