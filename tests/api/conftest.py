"""The application in process, around small random models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from model.loader import LoadedModel, load_model
from service.app import create_app
from service.settings import Settings
from tests.builders import make_native_model, make_tutorial_model
from tests.cluster.serving import on_ray
from tests.e2e.conftest import PATIENCE


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Letters in, phoneme-like words out; answers vary."""
    return load_model(make_native_model(tmp_path_factory.mktemp("native")), "cpu")


@pytest.fixture(scope="session")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The tutorial's model, without a tokenizer."""
    return load_model(make_tutorial_model(tmp_path_factory.mktemp("tutorial")), "cpu")


@pytest.fixture(scope="session")
def models(native: LoadedModel, tutorial: LoadedModel) -> dict[str, LoadedModel]:
    return {"native": native, "tutorial": tutorial}


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """The application with its lifespan, and a client of it."""
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        yield client


IN_PROCESS, ON_RAY = "in_process", "on_ray"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask both, where that is wanted, whatever a test asks `client`."""
    if "client" in metafunc.fixturenames and metafunc.config.getoption("on_ray"):
        one_process = metafunc.definition.get_closest_marker("one_process")
        targets = [IN_PROCESS] if one_process else [IN_PROCESS, ON_RAY]
        metafunc.parametrize("client", targets, indirect=True, scope="session")


@pytest.fixture(scope="session")
def ray_url(models: dict[str, LoadedModel]) -> Iterator[str]:
    """Where two replicas of each model are reached, behind a gateway."""
    pytest.importorskip("ray", reason="needs the extra ray")
    directories = {name: model.directory for name, model in models.items()}
    with on_ray(directories, "--replicas", "2") as server:
        yield server.url


@pytest.fixture(scope="session")
async def client(
    request: pytest.FixtureRequest, models: dict[str, LoadedModel]
) -> AsyncIterator[httpx.AsyncClient]:
    """Both models with default settings."""
    if getattr(request, "param", IN_PROCESS) == ON_RAY:
        url = request.getfixturevalue("ray_url")
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            yield client
    else:
        async with serving(create_app(Settings(), models)) as client:
            yield client


class Api:
    """Posts bodies and unwraps answers."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, path: str, **body: Any) -> Any:
        """The answer to a body that must be accepted."""
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text[:500]
        return response.json()

    async def refused(self, path: str, status: int = 422, **body: Any) -> Any:
        """The envelope of a body that must be refused."""
        response = await self.client.post(path, json=body)
        assert response.status_code == status, response.text[:500]
        envelope = response.json()
        assert envelope.keys() == {"error", "error_type", "param", "request_id"}
        assert envelope["request_id"] == response.headers["x-request-id"]
        return envelope


@pytest.fixture
def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


@pytest.fixture
def model_directory(native: LoadedModel) -> Path:
    return native.directory
