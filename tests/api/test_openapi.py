"""The OpenAPI document is kept: whatever it allows or forbids, no answer is another than it says.

Bodies are made from the document, right and wrong ones. `SCHEMATHESIS_EXAMPLES=1000` looks longer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from model.loader import LoadedModel
from service.app import create_app
from service.protocol import Protocol
from service.settings import Settings
from service.sockets import listen, url

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "20"))

UNWANTED = ("positive_data_acceptance", "not_a_server_error")
"""A body that the schema allows may ask for what a model does not have: an id, a language; or for
an answer within a nanosecond, which is a 504."""


DOCUMENT = schemathesis.openapi.from_dict(create_app(Settings()).openapi())
OPERATIONS = [result.ok() for result in DOCUMENT.get_all_operations()]


@pytest.fixture(scope="module")
def server(models: dict[str, LoadedModel]) -> Iterator[str]:
    """The URL of a server with two models, in a thread."""
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(Settings(timeout=20, max_rows=8, max_body_bytes=65536), models),
        http=Protocol,
        log_config=None,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield url(listener)
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
        for operation in OPERATIONS
        for mode in GenerationMode
        if operation.method == "post" or mode is GenerationMode.POSITIVE  # nothing to get wrong
    ],
)
def test_every_answer_is_one_that_the_document_promises(
    server: str, operation: schemathesis.APIOperation, mode: GenerationMode
) -> None:
    checks = [check for check in CHECKS.get_all() if check.__name__ not in UNWANTED]

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: schemathesis.Case) -> None:
        response = case.call(base_url=server)
        case.validate_response(response, checks=checks)
        asked_for = isinstance(case.body, dict) and case.body.get("timeout") is not None
        assert response.status_code < (505 if asked_for else 500)
        assert response.status_code not in (500, 501, 502, 503)

    ask()
