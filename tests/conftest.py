"""What holds for every test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# How long an example takes says nothing here: the machine may be training a model beside the tests.
settings.register_profile("seqserve", deadline=None)
settings.load_profile("seqserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-ray",
        action="store_true",
        help="ask a deployment on Ray, too, what the API's tests ask the application in process",
    )


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """Models here are tiny: handing their work to threads costs more than it saves."""
    torch.set_num_threads(1)
