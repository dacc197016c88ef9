"""What a task that a request names changes."""

from __future__ import annotations

import pytest

from model.config import GenerationDefaults, ModelSpec, Task
from seqserve.errors import InvalidRequestError
from service.tasks import NO_TASK, prefixed, task_of

SUMMARY = Task("summarize: ", 9, GenerationDefaults(num_beams=4, length_penalty=2.0))
SPEC = ModelSpec(
    family="t5",
    src_vocab_size=9,
    tgt_vocab_size=9,
    pad_id=0,
    decoder_start_ids=(0,),
    eos_ids=(1,),
    unk_id=2,
    max_src=20,
    max_tgt=20,
    default_max_new_tokens=12,
    defaults=GenerationDefaults(num_beams=2, no_repeat_ngram_size=3),
    tasks={"summarization": SUMMARY, "chat": Task(fault="chat asks for too much")},
)


def test_no_name_is_no_task() -> None:
    assert task_of(SPEC, None, "task") == NO_TASK
    assert SPEC.under(NO_TASK) == SPEC


def test_a_task_comes_before_the_models_defaults() -> None:
    found = SPEC.under(task_of(SPEC, "summarization", "task"))
    assert found.default_max_new_tokens == 9
    assert found.defaults == GenerationDefaults(
        num_beams=4, length_penalty=2.0, no_repeat_ngram_size=3
    )
    assert SPEC.under(Task(max_new_tokens=500)).default_max_new_tokens == SPEC.max_tgt


def test_what_a_task_states_has_the_names_of_parameters() -> None:
    assert SUMMARY.stated == {
        "prefix": "summarize: ",
        "max_new_tokens": 9,
        "num_beams": 4,
        "length_penalty": 2.0,
    }


def test_nothing_gets_no_prefix() -> None:
    assert prefixed(SUMMARY, "a") == "summarize: a"
    assert [prefixed(SUMMARY, text) for text in ("", " ")] == ["", " "]
    assert prefixed(NO_TASK, "a") == "a"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sum", 'p.task must be one of summarization, chat, got "sum"'),
        ("chat", "p.task chat cannot be served: chat asks for too much"),
    ],
)
def test_what_cannot_be_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        task_of(SPEC, name, "p.task")
    assert (caught.value.message, caught.value.param) == (message, "p.task")
