"""CUDA graphs for decoding steps: one launch in place of several hundred.

A small step's kernels take less time than their launches do. A graph repeats all of them with one
launch, on the very tensors that it was recorded with. So a step is recorded once for each number
of rows out of few (`bucket`), with keys and values at the cache's whole length: what a step adds
is masked, and rows in excess decode nothing that anyone reads.

Nothing here needs CUDA but `record`, so that the rest can be tested anywhere.

Reference:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model.attention import mask_bias, padding_mask
from model.cache import SlotKeysValues, SourceCache, StepKeysValues, TargetCache
from model.transformer import Transformer

WARM_UP = 3
"""Runs before a recording, in which libraries choose their kernels and take their memory."""

Repeat = Callable[[], Tensor]
"""Runs a computation once more, on the tensors that it was recorded with."""


def record(run: Callable[[], Tensor]) -> Repeat:
    """Record a computation without data-dependent shapes or reads back to the host."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def repeat() -> Tensor:
        graph.replay()
        return result

    return repeat


def bucket(rows: int) -> int:
    """The number of rows that a step is recorded for.

    >>> [bucket(rows) for rows in (1, 3, 8, 9, 33)]
    [1, 4, 8, 16, 40]
    """
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


@dataclass(frozen=True)
class Inputs:
    """What differs from step to step, all ``[rows]``: tokens to feed, and lengths before that.

    Rows in excess are fed token 0 at position 0, and attend to one position of whatever is there.
    """

    tokens: Tensor
    targets: Tensor
    sources: Tensor

    @classmethod
    def of(cls, rows: int, device: torch.device) -> Inputs:
        return cls(*torch.zeros(3, rows, dtype=torch.long, device=device).unbind())

    def fill(self, *live: Sequence[int]) -> None:
        """Put the live rows' numbers in; one transfer, for which the host does not wait."""
        numbers = torch.zeros(3, len(self.tokens), dtype=torch.long)
        numbers[2] = 1
        numbers[:, : len(live[0])] = torch.tensor(live)
        if self.tokens.is_cuda:
            numbers = numbers.pin_memory()
        for kept, new in zip((self.tokens, self.targets, self.sources), numbers, strict=True):
            kept.copy_(new, non_blocking=True)


class StepGraphs:
    """The recorded steps of one network and its caches.

    Args:
        record: makes a computation repeatable.
    """

    def __init__(
        self,
        network: Transformer,
        targets: TargetCache,
        sources: SourceCache,
        record: Callable[[Callable[[], Tensor]], Repeat] = record,
    ) -> None:
        self._network = network
        self._targets = targets
        self._sources = sources
        self._record = record
        self._recorded: dict[int, tuple[Inputs, Repeat]] = {}
        self._on: tuple[Tensor, ...] = ()  # what they were recorded on
        targets.pool.held = sources.pool.held = True

    def step(self, tokens: Sequence[int]) -> Tensor | None:
        """Logits ``[rows, vocab]`` behind a token for each live row.

        None where rows share sources, as beams do: that is not recorded.
        """
        live = len(tokens)
        if self._sources.slots != list(range(live)):
            return None
        rows = bucket(live)
        self._targets.pool.reserve(rows, self._targets.pool.longest + 1)
        self._sources.pool.reserve(rows, max(1, self._sources.pool.longest))
        on = (self._targets.pool.tensor, self._sources.pool.tensor)
        if any(now is not then for now, then in zip(on, self._on or (None, None), strict=True)):
            self._recorded, self._on = {}, on
        lengths = self._targets.pool.lengths, self._sources.pool.lengths
        if rows not in self._recorded:
            inputs = Inputs.of(rows, on[0].device)
            inputs.fill(tokens, *lengths)
            self._recorded[rows] = inputs, self._record(partial(self._run, inputs))
        inputs, repeat = self._recorded[rows]
        inputs.fill(tokens, *lengths)
        return repeat()[:live].clone()  # the next step writes there

    def release(self) -> None:
        """Forget what was recorded, and the caches that it was recorded on."""
        self._recorded, self._on = {}, ()

    def _run(self, inputs: Inputs) -> Tensor:
        """The step itself, on whole caches."""
        targets, sources = self._on
        rows = len(inputs.tokens)
        positions = inputs.targets[:, None]
        mask = padding_mask(inputs.targets + 1, targets.shape[4])
        places = torch.arange(rows, device=targets.device)[:, None]
        past = [StepKeysValues(k, v, places, positions) for k, v in targets[:, :, :rows]]
        seen = mask_bias(padding_mask(inputs.sources, sources.shape[4]), sources.dtype)
        source = [SlotKeysValues(k, v, seen, None) for k, v in sources[:, :, :rows]]
        hidden = self._network.decoder(inputs.tokens[:, None], past, source, mask, positions)
        logits: Tensor = self._network.output(hidden[:, 0])
        return logits
