"""The soak's own checks: each promise, broken on purpose, is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from model.loader import load_model
from seqserve.schemas import GenerateRequest, InfoResponse, Limits, ModelInfo
from tests.builders import make_native_model
from tests.soak.alone import ENDED, Judge, Verdict, differing_openings, replay, single_inputs
from tests.soak.answers import UnreadableError, differences, parts, swapped_ranks
from tests.soak.ledger import Ledger, footprint_faults, idle_faults
from tests.soak.process import MIB, Footprint
from tests.soak.report import percentile
from tests.soak.run import Compared
from tests.soak.traffic import Call, Question, Traffic
from tests.soak.wire import Reply

LIMITS = Limits(
    max_body_bytes=1 << 16,
    max_inputs=64,
    max_characters=100_000,
    max_beams=32,
    max_return_sequences=64,
    max_queue=64,
    max_queue_tokens=10**6,
    max_rows=32,
    max_json_values=10**6,
    max_tensor_values=10**6,
    default_timeout=60,
)
MODEL = ModelInfo(
    name="tiny",
    state="ready",
    src_vocab_size=31,
    tgt_vocab_size=33,
    max_source_tokens=48,
    max_target_tokens=200,
    waiting=0,
    running=0,
)
QUESTION = Question("greedy", "/generate", {"inputs": "cat"})
CALL = Call(7, "greedy", "POST", "/generate", frozenset({200, 429}), question=QUESTION)
HEADERS = {"x-request-id": "soak-7", "content-type": "application/json"}


def answered(status: int = 200, body: Any = None, **headers: str) -> Reply:
    body = {"generated_text": "K AE T"} if body is None else body
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply("answered", status, {**HEADERS, **headers}, encoded)


def envelope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"error": "no", "error_type": kind, "param": None, "request_id": "soak-7", **fields}


def faults(reply: Reply, **changes: Any) -> list[str]:
    ledger = Ledger()
    ledger.take(replace(CALL, **changes), reply)
    assert ledger.total() == 1
    return ledger.broken


class TestOneAnswerOrOneError:
    def test_an_answer_that_was_promised_breaks_nothing(self) -> None:
        assert not faults(answered())
        busy = answered(429, envelope("overloaded"), **{"retry-after": "1"})
        assert not faults(busy)

    @pytest.mark.parametrize(
        "reply",
        [
            Reply("lost", reason="ConnectionResetError"),
            Reply("hung", seconds=300.0),
            replace(answered(), surplus=b"HTTP/1.1 200 OK"),
            answered(**{"x-request-id": "soak-8"}),
            answered(500, envelope("internal")),
            answered(429, envelope("overloaded")),
            answered(429, b"busy", **{"retry-after": "1"}),
            answered(429, envelope("validation"), **{"retry-after": "1"}),
            answered(429, envelope("overloaded", request_id="other"), **{"retry-after": "1"}),
            answered(body=b'{"generated_text": '),
        ],
        ids=[
            "lost",
            "hung",
            "answered twice",
            "another call's answer",
            "a status that was not promised",
            "429 without Retry-After",
            "an error without envelope",
            "an error type of another status",
            "another call's error",
            "half an answer",
        ],
    )
    def test_what_was_not_promised_is_found(self, reply: Reply) -> None:
        [fault] = faults(reply)
        assert fault.startswith("call 7 (greedy, /generate): ")

    def test_an_error_must_name_the_field(self) -> None:
        refused = answered(422, envelope("validation", param="inputs"))
        expected = {"statuses": frozenset({422}), "question": None}
        assert not faults(refused, param="inputs", **expected)
        assert faults(refused, param="inputs[1]", **expected)

    def test_a_caller_who_leaves_is_owed_nothing(self) -> None:
        ledger = Ledger()
        ledger.take(CALL, Reply("left"))
        assert (ledger.broken, ledger.total("left"), ledger.total(200)) == ([], 1, 0)


def event(index: int, text: str, last: bool = False, **fields: Any) -> dict[str, Any]:
    details = {"finish_reason": "eos_token", "queue_time": 1.0, "inference_time": 2.0}
    return {
        "index": index,
        "sequence": 0,
        "token": {"id": 4 + index, "text": text, "logprob": -0.5, "special": False},
        "generated_text": "K AE" if last else None,
        "details": details if last else None,
        **fields,
    }


def stream(*events: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)


class TestStreams:
    question = Question("greedy", "/generate_stream", {"inputs": "cat"})

    def test_a_whole_stream_is_an_answer_without_its_times(self) -> None:
        body = stream(event(0, "K"), event(1, " AE", last=True))
        [[told]] = parts(self.question, answered(body=body))
        assert [each["token"]["text"] for each in told] == ["K", " AE"]
        assert told[-1]["details"] == {"finish_reason": "eos_token"}
        assert not faults(answered(body=body), question=self.question)

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            stream(event(0, "K")),
            stream(event(0, "K"), event(1, " AE", last=True))[:-9],
            stream(event(0, "K", last=True), event(1, " AE", last=True)),
            stream(event(0, "K"), event(1, " EH", last=True)),
        ],
        ids=["nothing", "no end", "cut off", "two ends", "other pieces than the text"],
    )
    def test_a_stream_that_is_not_whole_is_found(self, body: bytes) -> None:
        assert faults(answered(body=body), question=self.question)

    def test_an_error_in_a_stream_counts_as_its_status(self) -> None:
        body = stream(event(0, "K"), envelope("deadline"))
        late = {"question": self.question, "timeout": 0.1}
        assert not faults(answered(body=body), statuses=frozenset({504}), **late)
        assert faults(answered(body=body), statuses=frozenset({200}), **late)


# --- the server as a whole -----------------------------------------------------------------------


@pytest.mark.parametrize("left", [{"running": 1}, {"waiting": 2}])
def test_a_leaked_row_or_place_is_found(left: dict[str, int]) -> None:
    def info(model: ModelInfo) -> InfoResponse:
        return InfoResponse(version="0", torch=None, limits=LIMITS, models=[MODEL, model])

    assert not idle_faults(info(MODEL))
    assert len(idle_faults(info(MODEL.model_copy(update=left)))) == 1


def test_growing_memory_files_and_threads_are_found() -> None:
    warm = Footprint(rss=300 * MIB, files=12, threads=9)
    grown = [
        replace(warm, rss=316 * MIB),
        replace(warm, files=13),
        replace(warm, threads=200),
    ]
    assert not footprint_faults(warm, warm, replace(warm, rss=314 * MIB, threads=10), warm=True)
    assert not footprint_faults(warm, warm, grown[0], warm=False)
    for end in grown:
        assert len(footprint_faults(warm, warm, end, warm=True)) == 1


# --- answers alone -------------------------------------------------------------------------------


ALIKE = {"score": -1.0, "text": "K", "tokens": [{"id": 5, "logprob": -0.25}], "seed": None}


@pytest.mark.parametrize(
    ("served", "same"),
    [
        (ALIKE, True),
        ({**ALIKE, "score": -1.00005}, True),
        ({**ALIKE, "score": -1.0003}, False),
        ({**ALIKE, "score": None}, False),
        ({**ALIKE, "text": "G"}, False),
        ({**ALIKE, "seed": 0}, False),
        ({**ALIKE, "tokens": []}, False),
        ({**ALIKE, "tokens": [{"id": 6, "logprob": -0.25}]}, False),
        ({"text": "K"}, False),
    ],
)
def test_numbers_may_round_and_nothing_else_may_differ(served: Any, same: bool) -> None:
    assert (not list(differences(ALIKE, served))) is same


def test_candidates_of_equal_value_may_change_places() -> None:
    question = Question("next", "/next", {})
    alone = [{"tokens": [{"id": 5, "logit": 1.0}, {"id": 6, "logit": 1.00003}]}]
    swapped = [{"tokens": [{"id": 6, "logit": 1.00003}, {"id": 5, "logit": 1.0}]}]
    other = [{"tokens": [{"id": 6, "logit": 1.0}, {"id": 5, "logit": 0.5}]}]
    assert swapped_ranks(question, list(differences(alone, swapped)))
    assert not swapped_ranks(question, list(differences(alone, other)))


def test_a_list_of_inputs_is_several_questions() -> None:
    many = Question(
        "list", "/generate", {"inputs": ["a", "b"], "parameters": [{"seed": 1}, {"seed": 2}]}
    )
    assert [single.body for single in single_inputs(many)] == [
        {"inputs": "a", "parameters": {"seed": 1}},
        {"inputs": "b", "parameters": {"seed": 2}},
    ]
    several_targets = Question("score", "/score", {"inputs": "a", "targets": ["K", "G"]})
    assert single_inputs(several_targets) == [several_targets]


def test_openings_end_with_the_first_token_that_differs() -> None:
    assert differing_openings([[4, 5], [7, 8, 9]], [[4, 5], [7, 6, 9]]) == {1: [7, 6]}
    assert differing_openings([[4, 5]], [[4, 5, 6]]) == {0: [4, 5, 6]}
    assert differing_openings([[4, 5]], [[4]]) == {0: [4, ENDED]}
    assert differing_openings([[4], [5]], [[4]]) == {1: [ENDED]}
    assert differing_openings([[4, 5]], [[4, 5]]) == {}


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that cannot tell two of its tokens, 20 and 21, apart."""
    directory = make_native_model(tmp_path_factory.mktemp("torn"))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in ("output.weight", "decoder.embedding.tokens.weight"):
        tensors[name][21] = tensors[name][20]
    tensors["output.weight"][20:22] *= 1.5  # and likes to say them
    save_file(tensors, file)
    return directory


def served(tokens: list[int]) -> list[Any]:
    return [{"details": {"tokens": [{"id": id} for id in tokens]}}]


def test_a_decision_within_the_margin_is_rounding_and_any_other_is_wrong(torn: Path) -> None:
    parameters = {"details": True, "max_new_tokens": 8}
    body = {"model": "torn", "inputs": "dog", "parameters": parameters}
    question = Question("greedy", "/generate", body)
    [tokens] = replay(load_model(torn, "cpu"), GenerateRequest.model_validate(body), seed=0)
    at = next(i for i, token in enumerate(tokens) if token in (20, 21))
    twin = [*tokens[:at], 41 - tokens[at], *tokens[at + 1 :]]
    wrong = [*tokens[:at], 5, *tokens[at + 1 :]]
    judge = Judge({"torn": torn})
    assert judge.compare(question, served(tokens), served(tokens)) == Verdict()
    assert judge.compare(question, served(tokens), served(twin)).rounding
    assert judge.compare(question, served(tokens), served(wrong)).wrong
    assert judge.compare(question, served(tokens), served(tokens[:at])).wrong
    assert judge.compare(question, served(tokens), []).wrong


def test_a_wrong_answer_or_much_rounding_breaks_the_promise() -> None:
    assert not Compared(answers=2000, rounding=[("q", 2)]).faults
    assert Compared(answers=2000, rounding=[("q", 2), ("r", 1)]).faults
    assert Compared(answers=2000, wrong=["q"]).faults


# --- the traffic and the page --------------------------------------------------------------------


def test_the_same_seed_sends_the_same_and_everything_is_sent() -> None:
    def calls(seed: int) -> list[Call]:
        waves = Traffic(seed, 2000, [MODEL], LIMITS).waves()
        return [call for wave in waves for call in wave.calls]

    first, second, other = calls(1), calls(1), calls(2)
    assert first == second
    assert first != other
    assert [call.number for call in first] == list(range(2000))
    assert {c.path for c in first} >= {
        *("/generate", "/generate_stream", "/logits", "/next", "/score", "/attention"),
        *("/tokenize", "/detokenize", "/info", "/health", "/ready"),
    }
    assert {min(c.statuses) for c in first} >= {200, 400, 404, 405, 413, 422}


def test_percentiles_are_in_milliseconds() -> None:
    assert percentile([], 50) == 0.0
    assert percentile([0.5], 99) == 500.0
    assert percentile([i / 1000 for i in range(101)], 99) == pytest.approx(99.0)


def test_an_unreadable_answer_says_why() -> None:
    with pytest.raises(UnreadableError, match="JSONDecodeError"):
        parts(QUESTION, answered(body=b"{"))


def test_a_perplexity_may_move_as_far_as_its_logarithm() -> None:
    def moved(name: str, served: float) -> bool:
        return bool(list(differences({name: 33156.234}, {name: served})))

    assert not moved("perplexity", 33155.887)  # by 1.05e-5 in the mean log-probability
    assert moved("perplexity", 33150.0)  # by 1.9e-4
    assert moved("logprob_sum", 33155.887)
