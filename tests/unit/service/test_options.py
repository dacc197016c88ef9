"""Command line options made from fields."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, Literal

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from model.families.seqserve import TransformerConfig
from model.training import TrainingConfig
from seqserve.errors import InvalidRequestError
from service.options import Option, given, in_terms_of_options, options_of, with_options
from service.training_options import GRANULARITIES, SHAPE, TRAINING


class Example(BaseModel):
    count: int | None = Field(None, description="How many.")
    mode: Literal["a", "b"] = Field("a", description="Which.")
    names: tuple[str, ...] = Field(("x", "y"), description="Who.")
    deep: list[int] | None = Field(None, description="Not for a command line.")
    on: bool = Field(False, description="Whether.")


def test_each_plain_field_is_an_option() -> None:
    options = options_of(Example, env_prefix="E_", flags={"names": "--name"})
    assert [(o.typed, o.kind, o.default) for o in options] == [
        ("--count", int, ""),
        ("--mode", str, "a"),
        ("--name", list[str], "x, y"),
        ("--on", bool, ""),
    ]
    assert options[0].help == "How many. (E_COUNT)"


def test_a_command_gets_what_was_typed() -> None:
    app = typer.Typer()
    seen: list[dict[str, Any]] = []

    @app.command()
    @with_options(*options_of(Example, flags={"names": "--name"}))
    def command(path: str, **options: Any) -> None:
        seen.append({"path": path, **given(options)})

    done = CliRunner().invoke(
        app, ["p", "--count", "3", "--name", "u", "--name", "v", "--no-on", "--mode", "b"]
    )
    assert done.exit_code == 0, done.output
    assert seen == [{"path": "p", "count": 3, "names": ["u", "v"], "on": False, "mode": "b"}]
    assert CliRunner().invoke(app, ["p"]).exit_code == 0
    assert seen[1] == {"path": "p"}


def test_the_help_shows_defaults() -> None:
    app = typer.Typer()

    @app.command()
    @with_options(*options_of(Example, only=["mode"]))
    def command(**options: Any) -> None: ...

    assert "Which. (default: a)" in CliRunner().invoke(app, ["--help"]).output


def test_errors_speak_of_options() -> None:
    error = InvalidRequestError("max_rows must be at least 1, got 0", "max_rows")
    options = [Option("max_rows", int, "")]
    assert in_terms_of_options(error, options) == "--max-rows must be at least 1, got 0"
    assert in_terms_of_options(InvalidRequestError("no", None), options) == "no"


@pytest.mark.parametrize(
    ("options", "config", "others"),
    [
        (TRAINING, TrainingConfig, set()),
        (
            SHAPE,
            TransformerConfig,
            {
                *("src_vocab_size", "tgt_vocab_size", "max_src", "max_tgt", "tie_output"),
                "undo_label_smoothing",
                *("pad_id", "bos_id", "eos_id", "unk_id"),
            },
        ),
    ],
)
def test_training_options_mirror_the_trainer(
    options: list[Option], config: Any, others: set[str]
) -> None:
    declared = {field.name: field for field in fields(config)}
    assert {option.name for option in options} == declared.keys() - others
    for option in options:
        default = declared[option.name].default
        assert option.kind is type(default)
        assert option.help
        assert option.kind(option.default) == default


def test_granularities_are_the_trainer_s() -> None:
    from model.tokenizer import Granularity

    assert Granularity.__args__ == GRANULARITIES
    assert inspect.signature(TrainingConfig).parameters["source_tokens"].default in GRANULARITIES
