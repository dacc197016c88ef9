"""Command line options made from fields that are declared elsewhere, so that each stands once.

An option that is left out is None: its default stays with the class that declares it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from seqserve.errors import InvalidRequestError


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: keyword under which the command gets it.
        kind: type of its value; `list[str]` may be given several times.
        help: what it does.
        default: as shown in the help.
        flag: what is typed; None derives it from the name.
        panel: heading under which the help shows it.
        choices: the values it may have, where these are few.
    """

    name: str
    kind: Any
    help: str
    default: str = ""
    flag: str | None = None
    panel: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def typed(self) -> str:
        """What is typed: `--max-rows`."""
        return self.flag or "--" + self.name.replace("_", "-")


def options_of(
    model: type[BaseModel],
    *,
    only: Iterable[str] | None = None,
    panel: str | None = None,
    env_prefix: str | None = None,
    flags: dict[str, str] | None = None,
) -> list[Option]:
    """An option for each field of a class.

    Args:
        only: names of the fields wanted; None is all that fit on a command line.
        panel: heading in the help.
        env_prefix: environment variables with this prefix set the same; the help says so.
        flags: what is typed where it does not follow from the name.
    """
    options = []
    for name, field in model.model_fields.items():
        kind = _kind(field.annotation)
        if kind is None or (only is not None and name not in only):
            continue
        help = field.description or ""
        if env_prefix:
            help += f" ({env_prefix}{name.upper()})"
        default = _shown(field.get_default())
        options.append(Option(name, kind, help, default, (flags or {}).get(name), panel))
    return options


def with_options(*options: Option) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes `**keywords` these options beside its own parameters.

    typer reads a function's signature, so that is where the options are written.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters += [_parameter(option) for option in options]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in parameters}
        return function

    return decorate


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The options that were typed."""
    return {name: value for name, value in values.items() if value not in (None, [])}


def in_terms_of_options(error: InvalidRequestError, options: Iterable[Option]) -> str:
    """An error about fields as one about the options that set them."""
    message = error.message
    for option in options:
        if error.param and error.param.split("[")[0] == option.name:
            message = message.replace(option.name, option.typed, 1)
        elif "_" in option.name:  # could not be a word of the message's own
            message = re.sub(rf"\b{option.name}\b", option.typed, message)
    return message


def _parameter(option: Option) -> inspect.Parameter:
    declared = typer.Option(
        None,
        *([option.flag] if option.flag else []),
        help=option.help + (f" (default: {option.default})" if option.default else ""),
        show_default=False,
        rich_help_panel=option.panel,
    )
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(option.name, keyword, default=declared, annotation=option.kind | None)


def _kind(annotation: Any) -> Any:
    """What a command line value of this type is read as; None for structures."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        kinds = [_kind(argument) for argument in arguments if argument is not type(None)]
        return kinds[0] if len(kinds) == 1 else None
    if origin is Literal:
        return str
    if origin is tuple:
        return list[str]
    return annotation if annotation in (str, int, float, bool, Path) else None


def _shown(default: Any) -> str:
    if default is None or default is False or default == "":
        return ""
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
