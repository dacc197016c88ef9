"""`task`: from a name to what the model's files ask for."""

from __future__ import annotations

from model.config import ModelSpec, Task
from seqserve.errors import InvalidRequestError
from service.languages import listed
from service.validation import shown

NO_TASK = Task()


def task_of(spec: ModelSpec, name: str | None, place: str) -> Task:
    """The task that a request names; one that asks for nothing where it names none.

    Args:
        place: how an error message calls the field.

    Raises:
        InvalidRequestError: the model has no such task, or it cannot be served.
    """
    if name is None:
        return NO_TASK
    if not spec.tasks:
        raise InvalidRequestError(
            f"{place} needs a model with tasks, which this one does not have, got {shown(name)}",
            place,
        )
    task = spec.tasks.get(name)
    if task is None:
        raise InvalidRequestError(
            f"{place} must be one of {listed(list(spec.tasks))}, got {shown(name)}", place
        )
    if task.fault:
        raise InvalidRequestError(f"{place} {name} cannot be served: {task.fault}", place)
    return task


def prefixed(task: Task, text: str) -> str:
    """A source text with its task's prefix; nothing is still nothing."""
    return task.prefix + text if text.strip() else text
