"""GET /: the page's files, where they lie and what they may load."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from model.loader import LoadedModel
from seqserve.parameters import GenerationParameters
from service.app import create_app
from service.routes.page import PAGE
from service.settings import Settings
from tests.api.conftest import serving

pytestmark = pytest.mark.anyio

FILES = sorted(path.name for path in PAGE.iterdir())
SCRIPTS = [name for name in FILES if name.endswith(".js")]
TYPES = {".css": "text/css", ".html": "text/html", ".js": "javascript", ".svg": "image/svg+xml"}

RELATIVE = re.compile(r'(?:src|href)="([^"#]+)"')
IMPORT = re.compile(r'from "\./([^"]+)"')


async def test_the_root_is_the_page(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in response.headers["content-security-policy"]
    assert response.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", FILES)
async def test_every_file_is_served_with_its_type(client: httpx.AsyncClient, name: str) -> None:
    response = await client.get(f"/page/{name}")
    assert response.status_code == 200
    assert TYPES[Path(name).suffix] in response.headers["content-type"]
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/page/", "/page/nothing.js", "/page/%2e%2e/app.py"])
async def test_nothing_else_is_served(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


async def test_links_are_relative_and_lead_somewhere(native: LoadedModel) -> None:
    async with serving(create_app(Settings(root_path="/nlp"), {"m": native})) as client:
        page = await client.get("/nlp/")
        links = RELATIVE.findall(page.text)
        assert "page/app.js" in links
        for link in links:
            assert not link.startswith(("/", "http")), link
            assert (await client.get(f"/nlp/{link}")).status_code == 200, link


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_module_imports_only_what_is_there(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8")
    assert set(IMPORT.findall(text)) <= set(SCRIPTS)


async def test_the_policy_is_not_worked_around() -> None:
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    assert "style=" not in page
    assert not re.search(r"<script>|<style| on[a-z]+=", page)
    for name in SCRIPTS:
        text = (PAGE / name).read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\(|setAttribute\(.style", text)
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), name
    assert "url(" not in (PAGE / "page.css").read_text(encoding="utf-8")


async def test_the_form_sorts_parameters_that_exist() -> None:
    """A new parameter appears under "More"; one that is gone must not stay in a group."""
    text = (PAGE / "form.js").read_text(encoding="utf-8")
    named = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', text))
    assert named <= GenerationParameters.model_fields.keys()
