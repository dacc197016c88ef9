"""The log: one line a message, as text or as JSON, and one message a request."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

import orjson

from service.observation import PROBES, RequestRecord
from service.settings import LogFormat, LogLevel

logger = logging.getLogger(__name__)


def configure_logging(level: LogLevel, format: LogFormat) -> None:
    """Have all messages of the process go to standard error in one format."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def log_request(record: RequestRecord) -> None:
    """Write a request's line; probes, which come every few seconds, only at level debug."""
    level = logging.DEBUG if record.route in PROBES else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "request", extra={"fields": fields_of(record)})


def fields_of(record: RequestRecord) -> dict[str, Any]:
    """What the line of a request says of it; documented in docs/operations.md."""
    return {
        "request_id": record.request_id,
        "method": record.method,
        "route": record.route,
        "model": record.model,
        "status": record.status,
        "error_type": record.error_type,
        "client_gone": record.client_gone,
        "streamed": record.streamed,
        "inputs": record.inputs,
        "prompt_tokens": record.prompt_tokens,
        "generated_tokens": record.generated_tokens,
        "queue_ms": _milliseconds(record.queue),
        "inference_ms": _milliseconds(record.inference),
        "total_ms": round(record.seconds * 1e3, 3),
        "trace_id": record.trace_id,
    }


class JsonFormatter(logging.Formatter):
    """A JSON object a line: `time`, `level`, `logger`, `message`, then the message's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry).decode()


class TextFormatter(logging.Formatter):
    """Time, level and message; then the message's fields that say something, as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        fields = _fields(record).items()
        told = [f"{name}={_word(value)}" for name, value in fields if value not in ("", None)]
        return " ".join([super().formatMessage(record), *told])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _word(value: Any) -> str:
    """A value without spaces, or in quotation marks."""
    if isinstance(value, str):
        return json.dumps(value) if any(c in value for c in ' "=') else value
    return json.dumps(value)


def _milliseconds(span: tuple[float, float] | None) -> float:
    return round((span[1] - span[0]) * 1e3, 3) if span else 0.0
