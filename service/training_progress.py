"""How a training run shows where it stands: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from model.evaluation import Evaluation
from model.training import Progress as State

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def show_progress(console: Console | None = None) -> Iterator[Callable[[State], None]]:
    """What to call after every step."""
    console = console or Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("reading", total=None)

        def report(state: State) -> None:
            bar.update(task, completed=state.step, total=state.steps, description=_status(state))
            if state.evaluation:
                console.print(_evaluation(state.evaluation))

        yield report


class _Lines:
    """A line now and then, and one for each evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = float("-inf")

    def __call__(self, state: State) -> None:
        now = time.monotonic()
        if state.evaluation:
            self._console.print(_evaluation(state.evaluation))
        elif now - self._last >= SECONDS_BETWEEN_LINES or state.step == state.steps:
            self._last = now
            self._console.print(_status(state))


def _status(state: State) -> str:
    epoch = state.evaluation.epoch if state.evaluation else state.epoch + 1
    return (
        f"step {state.step:,}/{state.steps:,}  epoch {epoch}  loss {state.loss:.3f}  "
        f"{state.pairs_per_second:,.0f} pairs/s"
    )


def _evaluation(evaluation: Evaluation) -> str:
    return (
        f"after epoch {evaluation.epoch}: dev error rate {evaluation.error_rate:.2%}, "
        f"token error rate {evaluation.token_error_rate:.2%} ({evaluation.sources:,} sources)"
    )
