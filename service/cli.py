"""The command line. Heavy imports stand inside the commands, so that --help is quick."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from seqserve import __version__
from seqserve.errors import InvalidRequestError, SeqserveError
from seqserve.parameters import GenerationParameters
from seqserve.schemas import GenerateRequest
from service.cluster.arguments import Arguments
from service.hub import directory_of, locate
from service.keys import read_keys
from service.options import Option, given, in_terms_of_options, options_of, with_options
from service.settings import DEFAULT_MODEL, Settings, engine_config
from service.sockets import listen
from service.training_options import SHAPE, TRAINING
from service.validation import describe, parse_json

if TYPE_CHECKING:
    from model.loader import LoadedModel
    from model.training import Trainer
    from service.check import Report

app = typer.Typer(
    name="seqserve",
    help="Serve, run and train encoder-decoder Transformers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

SERVING = options_of(
    Settings,
    env_prefix="SEQSERVE_",
    flags={"models": "--model", "pairs": "--pair", "cors_origins": "--cors-origin"},
)
LOADING = options_of(
    Settings,
    only=("device", "dtype", "threads", "max_rows"),
    panel="Running",
    env_prefix="SEQSERVE_",
)
MODEL = "Directory of the model, or its id on the Hugging Face Hub: ORG/NAME or ORG/NAME@REVISION."
ON_RAY = "Replicas on Ray"
SCALING = options_of(
    Arguments,
    only=("replicas", "autoscale", "cpus"),
    panel=ON_RAY,
    flags={"cpus": "--replica-cpus"},
)
GENERATING = options_of(GenerationParameters, panel="Generation parameters")


def main() -> None:
    """Entry point."""
    # tokenizers would start a thread per core for every batch, beside torch's.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"seqserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --- serve ---------------------------------------------------------------------------------------


@app.command()
@with_options(*SERVING, *SCALING)
def serve(
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            rich_help_panel=ON_RAY,
            help="Serve with replicas on Ray: on the cluster that RAY_ADDRESS names, or one that "
            "is started here. Needs the extra ray.",
        ),
    ] = False,
    **options: Any,
) -> None:
    """Answer requests over HTTP.

    Examples:

    - `seqserve serve` serves the model that comes with the project on http://127.0.0.1:8000

    - `seqserve serve --model g2p=weights/g2p-en --model mine=out/my-model --port 9000`

    - `seqserve serve --model Helsinki-NLP/opus-mt-en-de` fetches it from the Hugging Face Hub

    - `SEQSERVE_DTYPE=bfloat16 seqserve serve --host 0.0.0.0`

    - `seqserve serve --ray --replicas 4 --threads 2` for more than one process

    Then `curl localhost:8000/generate -d '{"inputs": "hello"}'`; the documentation is at /docs.
    """
    scaling = given({option.name: options.pop(option.name) for option in SCALING})
    settings = _settings(options)
    try:
        locations = settings.locations
        settings.pairs_of(locations)
        read_keys(settings)  # again with the application; but wrong ones show at once
    except ValueError as error:
        _fail(str(error))
    for location in locations.values():
        if isinstance(location, Path):
            _check_directory(location)
    if ray:
        _serve_on_ray(settings, scaling)
        return
    for option in SCALING:
        if option.name in scaling:
            _fail(f"{option.typed} is about replicas, and needs --ray")
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        taken = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
        reason = error.strerror or error
        _fail(f"cannot listen on {settings.host}:{settings.port}: {reason}{taken}", code=1)
    from service import server  # torch; after what can be checked without it

    failure = server.serve(settings, listener)
    if failure:
        typer.echo(f"seqserve: {failure}", err=True)
    if any(thread.daemon for thread in threading.enumerate()):
        # A model is still being loaded, or signals came thick and fast: Python, when it shuts down
        # under a thread that is inside torch, aborts.
        sys.stderr.flush()
        os._exit(1 if failure else 0)
    if failure:
        raise typer.Exit(1)


def _serve_on_ray(settings: Settings, scaling: dict[str, Any]) -> None:
    from service.cluster import command

    try:
        arguments = Arguments(**{"cpus": settings.threads or 1, **scaling})
        command.check(arguments, settings)
    except ValidationError as error:
        _fail(in_terms_of_options(describe(error.errors(), Arguments), SCALING))
    except command.RayError as error:
        _fail(str(error))
    failure = command.serve(settings, arguments)
    if failure:
        _fail(failure, code=1)


def _settings(options: dict[str, Any]) -> Settings:
    values = given(options)
    for name in ("models", "pairs", "cors_origins"):
        if name in values:
            values[name] = tuple(values[name])
    try:
        return Settings(**values)
    except ValidationError as error:
        _fail(in_terms_of_options(describe(error.errors(), Settings), SERVING))


# --- generate ------------------------------------------------------------------------------------


@app.command()
@with_options(*GENERATING, *LOADING)
def generate(
    texts: Annotated[
        list[str] | None, typer.Argument(help="Inputs. None: lines from standard input.")
    ] = None,
    model: Annotated[str, typer.Option(help=MODEL)] = str(DEFAULT_MODEL),
    jsonl: Annotated[
        bool,
        typer.Option(
            "--jsonl",
            help="Lines are JSON objects as /generate takes them, with one input each: "
            '{"inputs": "hello", "parameters": {...}}; so are the answers.',
        ),
    ] = False,
    **options: Any,
) -> None:
    """Generate here, without a server.

    One line of output for each input, in order, as soon as it is known. A bad input gives an empty
    line (with --jsonl an object with "error") and a message, and the exit status is 1.

    Examples:

    - `seqserve generate hello world`

    - `seqserve generate --temperature 0.8 --seed 1 --details hello`

    - `seqserve generate < words.txt > pronunciations.txt`

    - `seqserve generate --jsonl < requests.jsonl > answers.jsonl`
    """
    parameters = _parameters({name: options.pop(name) for name in _names(GENERATING)})
    settings = _settings(options)
    loaded = _load(model, settings)
    from model.engine import Engine
    from service.batch import Batch
    from service.served import generator_of

    batch = Batch(
        generator_of(loaded), Engine(loaded, engine_config(settings)), window=8 * settings.max_rows
    )
    if not texts and sys.stdin.isatty():
        typer.echo("reading lines from the terminal; Ctrl-D ends", err=True)
    lines = map(os.fsencode, texts) if texts else sys.stdin.buffer
    failed = False
    for number, answer in enumerate(batch.run(_requests(lines, parameters, jsonl)), start=1):
        if isinstance(answer, SeqserveError):
            failed = True
            typer.echo(f"seqserve: line {number}: {answer.message}", err=True)
        typer.echo(
            _line(answer, as_json=jsonl or parameters.details or parameters.top_n_tokens > 0)
        )
    if failed:
        raise typer.Exit(1)


def _parameters(options: dict[str, Any]) -> GenerationParameters:
    try:
        return GenerationParameters(**given(options))
    except ValidationError as error:
        _fail(in_terms_of_options(describe(error.errors(), GenerationParameters), GENERATING))


def _requests(
    lines: Iterable[bytes], parameters: GenerationParameters, jsonl: bool
) -> Iterator[GenerateRequest | SeqserveError]:
    for line in lines:
        if not jsonl:
            yield _text_request(line, parameters)
        elif line.strip():
            yield _json_request(line, parameters)


def _text_request(line: bytes, parameters: GenerationParameters) -> GenerateRequest | SeqserveError:
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        return InvalidRequestError(f"not UTF-8: {error.reason} at byte {error.start}")
    return GenerateRequest(inputs=text, parameters=parameters)


def _json_request(line: bytes, parameters: GenerationParameters) -> GenerateRequest | SeqserveError:
    """A JSON line as a request; parameters of the command line are its defaults."""
    try:
        request = GenerateRequest.model_validate(parse_json(line))
    except ValidationError as error:
        return describe(error.errors(), GenerateRequest)
    except SeqserveError as error:
        return error
    if request.is_list:
        return InvalidRequestError("a line must have one input, not a list", request.place(0))
    for name in ("model", "timeout"):
        if getattr(request, name) is not None:
            return InvalidRequestError(f"{name} is for a server's /generate, not for here", name)
    own = request.parameters_of(0).model_dump(exclude_unset=True)
    both = {**parameters.model_dump(exclude_unset=True), **own}
    try:
        return request.model_copy(update={"parameters": GenerationParameters(**both)})
    except ValidationError as error:
        message = describe(error.errors(), GenerationParameters).message
        return InvalidRequestError(f"with the command line's parameters: {message}", "parameters")


def _line(answer: Any, as_json: bool) -> str:
    """One line of output."""
    if isinstance(answer, SeqserveError):
        envelope = {
            "error": answer.message,
            "error_type": answer.error_type,
            "param": answer.param,
        }
        return json.dumps(envelope, ensure_ascii=False) if as_json else ""
    if as_json:
        return json.dumps(answer.model_dump(exclude_unset=True), ensure_ascii=False)
    return " ".join((answer.generated_text or "").split("\n"))


# --- info ----------------------------------------------------------------------------------------


@app.command()
def info(
    model: Annotated[str, typer.Argument(help=MODEL)] = str(DEFAULT_MODEL),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a model directory holds, what a request gets by default, and what memory it takes.

    Example: `seqserve info weights/g2p-en`
    """
    from service.served import facts_of

    loaded = _load(model, _settings({"device": "cpu"}))
    suffixes = {".safetensors", ".bin", ".pt", ".pth"}
    size = sum(f.stat().st_size for f in loaded.directory.iterdir() if f.suffix in suffixes)
    facts = {"directory": str(loaded.directory), "bytes": size, **facts_of(loaded)}
    if as_json:
        typer.echo(json.dumps(facts))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if type(value) is int else str(value))
    Console().print(table)


# --- check ---------------------------------------------------------------------------------------


@app.command()
def check(
    model: Annotated[str, typer.Argument(help=MODEL)],
    text: Annotated[
        list[str] | None,
        typer.Option(help="An input; repeat the option. None: random token ids."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a model directory with what `transformers` makes of it, in float32 on the CPU.

    Token ids of the texts, encoder outputs, logits of whole targets and greedy tokens. The exit
    status is 0 if all are equal but for rounding, 1 if not, 2 if there is nothing to compare with.
    Nothing is fetched, and no code in the directory is run.

    Example: `seqserve check opus-mt-en-de --text "Good morning" --text "How are you?"`
    """
    loaded = _load(model, _settings({"device": "cpu", "dtype": "float32"}))
    from service.check import CheckError
    from service.check import check as compare

    try:
        report = compare(loaded, text or [])
    except (CheckError, SeqserveError) as error:
        _fail(str(error))
    typer.echo(json.dumps(report.facts)) if as_json else _print_report(report)
    if not report.equal:
        raise typer.Exit(1)


def _print_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "compared", "different", "largest difference", "bound")
    for finding in report.findings:
        numbers = (finding.largest, finding.bound)
        shown = ["" if number is None else f"{number:.1e}" for number in numbers]
        table.add_row(finding.what, str(finding.compared), str(finding.different), *shown)
    Console().print(table)
    for finding in report.findings:
        if finding.note:
            typer.echo(f"{finding.what}: {finding.note}")
    verdict = "equals" if report.equal else "DIFFERS FROM"
    typer.echo(f"{report.directory} ({report.family}) {verdict} {report.reference}")


# --- train ---------------------------------------------------------------------------------------


@app.command()
@with_options(*SHAPE, *TRAINING)
def train(
    data: Annotated[Path, typer.Option(help="Text file, a pair a line: source, tab, target.")],
    out: Annotated[Path, typer.Option(help="Directory for the model; made if it is not there.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in --out, if there is one.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes CUDA when there is one.")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves it to torch.")] = 0,
    **options: Any,
) -> None:
    """Train a Transformer on pairs of texts; `seqserve serve --model DIR` then serves it.

    Vocabularies and maximum lengths come from the data. The best use of a small data set is a small
    model: begin with the defaults, look at the dev error rates, then change one thing at a time.
    Interrupting loses at most --checkpoint-every steps: the same command with --resume goes on.

    Examples:

    - `seqserve train --data pairs.tsv --out out/my-model`

    - `seqserve train --data pairs.tsv --out out/my-model --resume`

    - `seqserve train --data en-de.tsv --out out/en-de --source-tokens sentencepiece
      --target-tokens sentencepiece --vocab-size 8000 --dim 512 --heads 8 --hidden-dim 2048`
    """
    import torch

    if not data.is_file():
        _fail(f"{data}: no such file")
    if threads:
        torch.set_num_threads(threads)
    trainer = _trainer(data, out, device, options)
    try:
        resumed = resume and trainer.resume()
    except ValueError as error:
        _fail(str(error))
    if not resume and (out / "checkpoint.pt").exists():
        _fail(f"{out} has a checkpoint already: go on with --resume, or choose another --out")
    dev = len({source for source, _ in trainer.dev})
    counts = f"{len(trainer.examples):,} pairs, {dev:,} dev sources"
    parameters = sum(p.numel() for p in trainer.model.parameters())
    typer.echo(f"{counts}, {parameters:,} parameters" + (f", from step {trainer.step}" * resumed))
    _run_training(trainer)
    typer.echo(f"written to {out}; serve it with: seqserve serve --model {out}")


def _trainer(data: Path, out: Path, device: str, options: dict[str, Any]) -> Trainer:
    from model.training import Trainer, TrainingConfig, read_pairs

    shape = given({name: options[name] for name in _names(SHAPE)})
    settings = given({name: options[name] for name in _names(TRAINING)})
    for option in TRAINING:
        if option.choices and settings.get(option.name, option.default) not in option.choices:
            choices = ", ".join(option.choices)
            _fail(f"{option.typed} must be one of {choices}, got {settings[option.name]!r}")
    try:
        return Trainer(read_pairs(data), out, shape, TrainingConfig(**settings), device)
    except (ValueError, OSError) as error:
        _fail(str(error))


def _run_training(trainer: Trainer) -> None:
    from service.training_progress import show_progress

    interrupted: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        interrupted.append(number)
        trainer.interrupt()  # behind the running step: a checkpoint inside one would not be exact

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with show_progress() as report:
            trainer.run(report)
        if interrupted:
            message = f"interrupted at step {trainer.step}; go on with --resume"
            _fail(message, code=128 + interrupted[0])
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        _fail("out of memory; try a smaller --batch-tokens or --dim", code=1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- shared --------------------------------------------------------------------------------------


def _load(model: str, settings: Settings) -> LoadedModel:
    location = locate(model)
    if isinstance(location, Path):
        _check_directory(location)
    import torch

    from model.checkpoint import ModelError
    from model.loader import load_model

    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        return load_model(directory_of(location), settings.device, settings.dtype)
    except (ModelError, OSError) as error:
        _fail(str(error), code=1)
    except (MemoryError, torch.OutOfMemoryError):
        _fail("out of memory; try --dtype bfloat16 or another --device", code=1)


def _check_directory(directory: Path) -> None:
    """What can be seen without loading."""
    if directory.is_file():
        _fail(f"{directory}: not a directory but a file")
    if not directory.is_dir():
        _fail(f"{directory}: no such directory")
    if not (directory / "config.json").is_file():
        _fail(f"{directory}: no config.json in it, so it is no model directory")


def _names(options: list[Option]) -> list[str]:
    return [option.name for option in options]


def _fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"seqserve: {message}", err=True)
    raise typer.Exit(code)
