"""A file of tab-separated lines through the model: each line gets its answer as one more column.

    python examples/translate_file.py words.tsv spoken.tsv --parameters '{"num_beams": 4}'

A line that fails gets an empty answer and a message, and then the exit status is 1.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

from seqserve import Client, SeqserveError


def main() -> int:
    arguments = parsed()
    with arguments.source.open(encoding="utf-8", newline="\n") as file:
        rows = [line.rstrip("\r\n").split("\t") for line in file]
    for number, row in enumerate(rows, start=1):
        if len(row) <= arguments.column:
            sys.exit(f"{arguments.source}, line {number}: there is no column {arguments.column}")
    failures = []
    with Client(model=arguments.model) as client, arguments.out.open("w", encoding="utf-8") as out:

        def answer(row: list[str]) -> str:
            text = client.generate(row[arguments.column], arguments.parameters).generated_text
            return " ".join((text or "").split())  # what has tabs or line ends fits no column

        answers = client.map(
            answer, rows, concurrency=arguments.concurrency, errors="return", progress=progress()
        )
        for number, (row, text) in enumerate(zip(rows, answers, strict=True), start=1):
            if isinstance(text, SeqserveError):
                failures.append(f"line {number}: {text}")
                text = ""
            print(*row, text, sep="\t", file=out)
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    print(f"{len(rows) - len(failures)} of {len(rows)} lines answered")
    return 1 if failures else 0


def progress() -> bool | Callable[[int, int | None], object]:
    """A bar where tqdm is installed, else a line every thousand answers."""
    if importlib.util.find_spec("tqdm"):
        return True
    return lambda done, total: done % 1000 or print(f"{done} of {total}", file=sys.stderr)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="a file of tab-separated lines")
    parser.add_argument("out", type=Path, help="where they go, with the answers")
    parser.add_argument("--column", type=int, default=0, help="of the source texts, from 0")
    parser.add_argument("--model", help="its name; left out, the server's first")
    parser.add_argument("--parameters", type=json.loads, help="of /generate, as JSON")
    parser.add_argument("--concurrency", type=int, default=16, help="lines on their way at once")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
