"""`seqserve train` as a process: interrupted, it leaves what it needs to go on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from model.loader import load_model

COMMAND = [sys.executable, "-c", "from seqserve.cli import main; main()", "train"]
SMALL = (
    "--dim 16 --heads 2 --hidden-dim 16 --encoder-layers 1 --decoder-layers 1 --dev-size 9 "
    "--batch-tokens 64"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, number: signal.Signals) -> None:
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]
    data = tmp_path / "pairs.tsv"
    data.write_text("".join(f"{word}\t{' '.join(reversed(word))}\n" for word in words))
    out = tmp_path / "out"
    options = f"--data {data} --out {out} {SMALL} --epochs 30 --evaluate-every 30 --threads 1"
    command = [*COMMAND, *options.split()]

    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert first.stdout
    with first.stdout as lines:
        next(line for line in lines if "step" in line)
        first.send_signal(number)
        said = lines.read()
    assert first.wait(60) == 128 + number
    assert "interrupted at step" in said
    assert "Traceback" not in said

    step = int(said.split("interrupted at step ")[1].split(";")[0])
    second = subprocess.run(
        [*command, "--resume"], capture_output=True, text=True, timeout=120, check=True
    )
    assert f"step {step}" in second.stdout + second.stderr
    assert load_model(out).spec.family == "seqserve"
