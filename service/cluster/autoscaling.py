"""How many replicas a model should have: as many as have rows for its accepted inputs.

Ray asks each replica for its figures, averages them over a while and applies its delays; the rule
is all that stands here. Inputs count, not requests: one request may bring a thousand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

OUTSTANDING = "outstanding_inputs"
"""Inputs that a replica has accepted and not yet answered: those in rows and those that wait."""


class Context(Protocol):
    """What the rule needs of Ray's context."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Name of a figure -> replica -> its average."""


class ByOutstandingInputs:
    """A replica for every so many accepted inputs.

    Args:
        per_replica: inputs that one replica should have. With its `max_rows` here, replicas are
            added as soon as inputs wait for rows.
    """

    def __init__(self, per_replica: float) -> None:
        self.per_replica = per_replica

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """Replicas wanted (Ray rounds up and keeps its bounds), and no state."""
        outstanding = (context.aggregated_metrics or {}).get(OUTSTANDING)
        if not outstanding:  # no replica has told anything yet
            return context.target_num_replicas, {}
        return sum(outstanding.values()) / self.per_replica, {}
