"""What the Ray Serve application is told, by a Serve config or by `seqserve serve --ray`."""

from __future__ import annotations

import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

BOUNDS = re.compile(r"(?P<least>\d{1,6}):(?P<most>\d{1,6})")


class Arguments(BaseModel):
    """Arguments of the application."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, Any] = Field(
        {},
        description="Settings of the server, by their names; `SEQSERVE_` variables set the others, "
        "where the application is built.",
    )
    replicas: int = Field(1, ge=1, description="Replicas of each model.")
    autoscale: str | None = Field(
        None, description="Instead: replicas of each model at least and at most, as MIN:MAX."
    )
    autoscaling: dict[str, Any] = Field(
        {},
        description="With it: fields of Ray's `autoscaling_config`, such as `downscale_delay_s`.",
    )
    cpus: float = Field(
        1.0, gt=0, description="CPUs that Ray counts for each replica, also parts of one."
    )
    gpus: float = Field(0.0, ge=0, description="Likewise GPUs.")
    gateways: int = Field(
        1,
        ge=1,
        description="Processes that stand in front of the models, where there are several.",
    )

    @field_validator("autoscale")
    @classmethod
    def _is_a_range(cls, value: str | None) -> str | None:
        if value is not None:
            bounds(value)
        return value

    @model_validator(mode="after")
    def _one_way_to_count(self) -> Self:
        if self.autoscale and "replicas" in self.model_fields_set:
            raise ValueError("autoscale takes the place of replicas: give one of the two")
        if self.autoscaling and not self.autoscale:
            raise ValueError("autoscaling says how to autoscale: give autoscale too")
        return self


def bounds(text: str) -> tuple[int, int]:
    """`MIN:MAX` as two numbers.

    Raises:
        ValueError: it is something else.
    """
    match = BOUNDS.fullmatch(text)
    least, most = (int(match["least"]), int(match["most"])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(f"autoscale must be MIN:MAX with 1 <= MIN <= MAX, got {text!r}")
    return least, most
