"""Each program in examples/, and the blocks of docs/sdk.md, against a live server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seqserve import Client

from .conftest import PATIENCE, ROOT, Server, serving

EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```(?:\n```text\n(?P<printed>.*?)```)?", re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def run(url: str, *command: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program of the folder against a server."""
    name, *arguments = map(str, command)
    runner = ["sh"] if name.endswith(".sh") else [sys.executable]
    done = subprocess.run(
        [*runner, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "SEQSERVE_URL": url, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == status, done.stderr
    return done


def test_curl(server: Server) -> None:
    lines = [line for line in run(server.url, "curl.sh").stdout.splitlines() if line]
    titles = [line for line in lines if line.startswith("# ")]
    assert len(titles) == 9
    answers = [json.loads(line) for line in lines if line.startswith(("{", "["))]
    assert answers[0] == {"generated_text": "T R AE N S F AO R M ER"}
    assert [answer["generated_text"] for answer in answers[1]] == ["L EH F T", "R AY T"]
    assert len(answers[2]["sequences"]) == 3
    assert answers[-1] == {"text": "K AE T"}
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert events[-1]["generated_text"] == "K AE T"


def test_where_there_is_no_server_an_example_says_so() -> None:
    nowhere = "http://127.0.0.1:9"
    assert "curl: (7)" in run(nowhere, "curl.sh", status=7).stderr
    assert "start one with `make serve`" in run(nowhere, "sync_client.py", status=1).stderr


def test_sync_client(server: Server) -> None:
    printed = run(server.url, "sync_client.py").stdout
    assert printed.startswith("g2p-en: seqserve on cpu, ready\n")
    assert "an answer: T R AE N S F AO R M ER\n" in printed
    assert "two answers: ['L EH F T', 'R AY T']\n" in printed
    assert len(re.findall(r"^  +-\d\.\d{3}  [A-Z ]+$", printed, re.MULTILINE)) == 3
    assert "refused, status 422, because of parameters.top_p: parameters.top_p must" in printed


def test_async_client(server: Server) -> None:
    lines = run(server.url, "async_client.py", "left", "right", "cat").stdout.splitlines()
    assert lines[0].startswith("hello: HH ")
    assert lines[1] == "behind HH: ['EH', 'EY']"
    assert lines[2:] == ["L EH F T", "R AY T", "K AE T"]


def test_streaming(server: Server) -> None:
    lines = run(server.url, "streaming.py", "cat").stdout.splitlines()
    assert [line.split("% ")[1] for line in lines[:3]] == ["K", " AE", " T"]
    assert all(0 < float(line.split("%")[0]) <= 100 for line in lines[:3])
    assert lines[3:] == ["= K AE T (eos_token)", "stopped after two tokens"]


def test_a_file_keeps_its_lines_and_gets_a_column(server: Server, tmp_path: Path) -> None:
    rows = [(f"w{i}", word) for i, word in enumerate(["cat", "left", "right"] * 20)]
    words, spoken = tmp_path / "words.tsv", tmp_path / "spoken.tsv"
    words.write_text("".join(f"{name}\t{word}\n" for name, word in rows))
    beams = ("--column", "1", "--parameters", '{"num_beams": 2}', "--concurrency", "8")
    done = run(server.url, "translate_file.py", words, spoken, *beams)
    assert done.stdout == "60 of 60 lines answered\n"
    assert "60/60" in done.stderr  # the bar
    answers = {"cat": "K AE T", "left": "L EH F T", "right": "R AY T"}
    expected = [f"{name}\t{word}\t{answers[word]}" for name, word in rows]
    assert spoken.read_text().splitlines() == expected


def test_a_line_that_fails_is_named_and_left_empty(server: Server, tmp_path: Path) -> None:
    words, spoken = tmp_path / "words.tsv", tmp_path / "spoken.tsv"
    words.write_text(f"cat\n{'a' * 40}\n\n")
    done = run(server.url, "translate_file.py", words, spoken, status=1)
    assert re.search(r"^line 2: inputs has 41 tokens", done.stderr, re.MULTILINE)
    assert done.stdout == "2 of 3 lines answered\n"
    assert spoken.read_text() == f"cat\tK AE T\n{'a' * 40}\t\n\t\n"
    done = run(server.url, "translate_file.py", words, spoken, "--column", "1", status=1)
    assert "words.tsv, line 1: there is no column 1" in done.stderr


def test_rerank(server: Server) -> None:
    candidates = ["S AE T", "K AE T", "K AE T S"]
    lines = run(server.url, "rerank.py", "cat", *candidates).stdout.splitlines()[1:]
    totals = {text: float(total) for total, _, _, text in (line.split(None, 3) for line in lines)}
    assert lines[0].endswith("  K AE T")
    with Client(server.url) as client:
        scores = client.score("cat", candidates)
    for candidate, score in zip(candidates, scores, strict=True):
        assert totals[candidate] == pytest.approx(score.logprob_sum, abs=2e-3)
    assert len(run(server.url, "rerank.py").stdout.splitlines()) == 5


def test_every_example_is_listed_and_run() -> None:
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    listed = set(re.findall(r"\]\(([a-z_]+\.\w+)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == programs
    here = Path(__file__).read_text()
    assert all(f'"{name}"' in here for name in programs)


def test_the_client_s_page_prints_what_it_says(server: Server) -> None:
    page = (ROOT / "docs" / "sdk.md").read_text().replace("http://127.0.0.1:8000", server.url)
    names: dict[str, Any] = {}
    blocks = list(BLOCK.finditer(page))
    assert len(blocks) > 8
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], "docs/sdk.md", "exec", dont_inherit=True), names)
        assert printed.getvalue() == (block["printed"] or "")
