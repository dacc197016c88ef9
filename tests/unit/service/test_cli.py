"""The command line in process; `serve` is tested over a real socket in tests/e2e."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from seqserve import __version__
from service.cli import app
from tests.builders import (
    make_byt5_model,
    make_m2m_model,
    make_native_model,
    make_tutorial_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_native_model(tmp_path_factory.mktemp("native"))


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def generate(model: Path, *arguments: str, stdin: str | bytes | None = None) -> Result:
    return run("generate", "--model", str(model), "--device", "cpu", *arguments, stdin=stdin)


def test_help_teaches_with_examples() -> None:
    for command in ("serve", "generate", "train", "info", "check"):
        text = run(command, "--help").output
        assert "Example" in text
        assert f"seqserve {command}" in text
    assert all(c in run("--help").output for c in ("serve", "generate", "train", "info", "check"))


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, service.cli; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_version() -> None:
    assert run("--version").stdout == f"seqserve {__version__}\n"


# --- serve ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "2"], "--replicas is about replicas, and needs --ray"),
        (["--autoscale", "1:2"], "--autoscale is about replicas, and needs --ray"),
        (["--replica-cpus", "1"], "--replica-cpus is about replicas, and needs --ray"),
        (["--ray", "--replicas", "0"], "--replicas must be at least 1, got 0"),
        (["--ray", "--autoscale", "3:1"], "autoscale must be MIN:MAX with 1 <= MIN <= MAX"),
        (["--ray", "--replicas", "2", "--autoscale", "1:2"], "give one of the two"),
    ],
)
def test_replicas_that_make_no_sense_are_refused(options: list[str], message: str) -> None:
    done = run("serve", *options)
    assert done.exit_code == 2
    assert message in done.stderr


# --- generate ------------------------------------------------------------------------------------


def test_texts_give_lines_in_order(model: Path) -> None:
    words = ["hello", "world", "", "fox"]
    done = generate(model, *words)
    assert done.exit_code == 0
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 4
    assert lines[2] == ""
    assert lines == [generate(model, word).stdout.rstrip("\n") for word in words]
    assert generate(model, stdin="hello\r\nworld\n\nfox").stdout == done.stdout


def test_languages_are_options_like_other_parameters(tmp_path: Path) -> None:
    multilingual = make_m2m_model(tmp_path)
    languages = ("--src-lang", "ja", "--tgt-lang", "fr")
    done = generate(multilingual, *languages, "--details", "--max-new-tokens", "3", "ab")
    first = json.loads(done.stdout)["details"]["tokens"][0]
    assert first["text"] == "__fr__"
    lines = '{"inputs": "ab", "parameters": {"tgt_lang": "de", "details": true}}\n'
    done = generate(multilingual, "--jsonl", *languages, "--max-new-tokens", "3", stdin=lines)
    assert json.loads(done.stdout)["details"]["tokens"][0]["text"] == "__de__"
    done = generate(multilingual, "--tgt-lang", "xx", "ab")
    assert done.exit_code == 1
    assert "tgt_lang must be a language of this model" in done.stderr


def test_a_task_is_an_option_too(tmp_path: Path) -> None:
    directory = make_byt5_model(tmp_path)
    path = tmp_path / "config.json"
    tasks = {"summarization": {"max_length": 4, "prefix": "summarize: "}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_specific_params": tasks}))
    named = generate(directory, "--task", "summarization", "ab")
    assert named.stdout == generate(directory, "--max-new-tokens", "3", "summarize: ab").stdout
    refused = generate(directory, "--task", "translation", "ab")
    assert "task must be one of summarization" in refused.stderr


def test_details_give_json(model: Path) -> None:
    done = generate(model, "--details", "--max-new-tokens", "2", "hello")
    answer = json.loads(done.stdout)
    assert answer["details"]["generated_tokens"] == 2


def test_json_lines_in_and_out(model: Path) -> None:
    requests = [
        {"inputs": "hello", "parameters": {"max_new_tokens": 1}},
        {"input_ids": [5, 6, 2]},
        {"inputs": "hello"},
    ]
    stdin = "\n".join(json.dumps(r) for r in requests) + "\n\n"
    done = generate(model, "--jsonl", "--max-new-tokens", "3", stdin=stdin)
    assert done.exit_code == 0, done.output
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(a["generated_text"].split()) for a in answers] == [1, 3, 3]


def test_bad_lines_are_reported_in_place_and_the_rest_goes_on(model: Path) -> None:
    stdin = b'{"inputs": "a"}\n{"input": "a"}\n{bad\n{"inputs": ["a"]}\n\xff\n{"inputs": "b"}\n'
    done = generate(model, "--jsonl", stdin=stdin)
    assert done.exit_code == 1
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["error" in a for a in answers] == [False, True, True, True, True, False]
    assert "line 2: input is not a known field; did you mean inputs?" in done.stderr
    assert "line 4: a line must have one input" in done.stderr
    done = generate(model, stdin=b"hello\n\xff\n" + b"x" * 100 + b"\nfox\n")
    assert done.exit_code == 1
    assert [bool(line) for line in done.stdout.split("\n")[:-1]] == [True, False, False, True]
    assert "line 2: not UTF-8" in done.stderr
    assert "101 tokens, the model takes at most 48" in done.stderr


def test_a_line_at_odds_with_the_command_line_is_reported_in_place(model: Path) -> None:
    lines = [
        {"inputs": "a", "parameters": {"do_sample": False}},
        {"inputs": "a", "parameters": {"target_prefix_ids": [5]}},
        {"inputs": "a", "model": "other"},
        {"inputs": "a", "timeout": 1},
        {"inputs": "a"},
    ]
    stdin = "\n".join(map(json.dumps, lines))
    done = generate(model, "--jsonl", "--temperature", "0.5", "--target-prefix", "HH", stdin=stdin)
    assert done.exit_code == 1
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["error" in a for a in answers] == [True, True, True, True, False]
    assert "do_sample is false, but temperature would sample" in answers[0]["error"]
    assert "target_prefix and target_prefix_ids exclude each other" in answers[1]["error"]
    assert answers[2]["param"] == "model"
    assert answers[3]["param"] == "timeout"
    assert "Traceback" not in done.output


def test_an_argument_that_is_no_utf_8_is_reported_and_the_rest_goes_on(model: Path) -> None:
    done = generate(model, "\udcff\udcfe", "fox")
    assert done.exit_code == 1
    assert "line 1: not UTF-8" in done.stderr
    assert [bool(line) for line in done.stdout.split("\n")[:-1]] == [False, True]


def test_a_bad_variable_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_DTYPE", "int3")
    for done in (run("info", str(model)), generate(model, "a")):
        assert done.exit_code == 2
        assert "--dtype must be" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--top-p", "2", "x"), "--top-p must be in (0, 1], got 2.0"),
        (
            ("generate", "--no-do-sample", "--top-k", "2", "x"),
            "--do-sample is false, but --top-k would sample",
        ),
        (("generate", "--model", "/nowhere", "x"), "/nowhere: no such directory"),
        (("generate", "--model", "/", "x"), "no config.json in it"),
        (("generate", "--dtype", "int3", "x"), "--dtype must be"),
        (("generate", "--max-rows", "0", "x"), "--max-rows must be in [1, 65536], got 0"),
        (("serve", "--port", "70000"), "--port must be in [0, 65535], got 70000"),
        (("serve", "--model", "/nowhere"), "/nowhere: no such directory"),
        (("serve", "--model", "=x"), "NAME=DIR or DIR, got '=x'"),
        (("serve", "--model", "x=/a", "--model", "x=/b"), "two models are called 'x'"),
        (("serve", "--max-queue", "5"), "must not be over --max-queue"),
        (("info", "/nowhere"), "/nowhere: no such directory"),
        (("info", __file__), f"{__file__}: not a directory but a file"),
        (("train", "--data", "/nowhere", "--out", "/tmp/x"), "/nowhere: no such file"),
    ],
    ids=str,
)
def test_mistakes_are_named(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_a_model_that_cannot_be_loaded_is_named(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dim": 40}))
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    done = generate(tmp_path, "x")
    assert done.exit_code == 1
    assert done.stderr.startswith("seqserve: ")
    assert "Traceback" not in done.output


@pytest.mark.parametrize("error", [MemoryError(), None])
def test_out_of_memory_gives_advice(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    import torch

    def fail(*_: object) -> None:
        raise error or torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("model.loader.load_model", fail)
    done = generate(model, "x")
    assert done.exit_code == 1
    assert "out of memory" in done.stderr


# --- info ----------------------------------------------------------------------------------------


def test_info_prints_a_table_or_json(model: Path, tmp_path: Path) -> None:
    table = run("info", str(model))
    assert table.exit_code == 0
    assert "seqserve" in table.stdout
    facts = json.loads(run("info", str(model), "--json").stdout)
    assert facts["family"] == "seqserve"
    assert facts["max_source_tokens"] == 48
    assert facts["parameters"] > 0
    assert facts["dtype"] == "float32"
    assert f"{facts['cache_bytes_per_request']:,}" in table.stdout
    tutorial = json.loads(run("info", str(make_tutorial_model(tmp_path)), "--json").stdout)
    assert tutorial["source_is_target"]
    assert not tutorial["source_tokenizer"]
    assert "cache_bytes_per_request" not in tutorial


# --- train ---------------------------------------------------------------------------------------

PAIRS = "".join(f"{'ab' * (1 + i % 3)}{'cd'[i % 2]}{i}\tX{i % 5} Y{i % 3} Z\n" for i in range(40))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.tsv"
    path.write_text(PAIRS)
    return path


def train(data: Path, out: Path, *arguments: str) -> Result:
    shape = ["--dim", "16", "--heads", "2", "--hidden-dim", "16"]
    layers = ["--encoder-layers", "1", "--decoder-layers", "1", "--dev-size", "5"]
    common = ["train", "--data", str(data), "--out", str(out), *shape, *layers]
    return run(*common, *arguments)


def test_train_makes_a_model_that_generates(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = train(data, out, "--epochs", "2", "--threads", "1")
    assert done.exit_code == 0, done.output
    assert "35 pairs, 5 dev sources" in done.stdout
    assert "dev error rate" in done.stdout
    assert f"seqserve serve --model {out}" in done.stdout.replace("\n", "")
    assert generate(out, "abc1").exit_code == 0


def test_train_goes_on_only_when_told_to(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert train(data, out, "--epochs", "1").exit_code == 0
    again = train(data, out, "--epochs", "1")
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    resumed = train(data, out, "--epochs", "1", "--resume")
    assert resumed.exit_code == 0
    assert "from step" in resumed.stdout
    other = train(data, out, "--epochs", "1", "--resume", "--learning-rate", "0.5")
    assert other.exit_code == 2
    assert "other settings" in other.stderr


def test_training_mistakes_are_named(data: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("--source-tokens", "bytes"), "--source-tokens must be one of char, whitespace"),
        (("--dev-size", "400"), "dev_size must be under"),
        (("--dim", "15"), "15"),
        (("--device", "tpu"), "device must be auto, cpu or cuda, got 'tpu'"),
        (("--start-from", "/nowhere"), "/nowhere"),
    ):
        done = train(data, tmp_path / "out", *arguments)
        assert done.exit_code == 2, done.output
        assert message in done.stderr
    data.write_text("no tab here\n")
    done = train(data, tmp_path / "out")
    assert done.exit_code == 2
    assert "pairs.tsv:1" in done.stderr
