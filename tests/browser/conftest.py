"""The page in a real browser: the system's chromium, driven by Playwright.

Where one of them is missing the tests skip; `make test-browser` installs both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.builders import make_m2m_model, make_tutorial_model
from tests.e2e.conftest import ROOT, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 120_000.0
"""Milliseconds for what takes a few: the machine may be busy with other things."""

SIZES = {"desktop": {"width": 1280, "height": 940}, "phone": {"width": 390, "height": 844}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, and say how not to, where there is no browser."""
    missing = []
    if CHROMIUM is None:
        missing.append("chromium (apt-get install chromium)")
    if find_spec("playwright") is None:
        missing.append("playwright (pip install playwright)")
    if missing:
        reason = f"needs {' and '.join(missing)}; make test-browser installs what is missing"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    # Chromium's own sandbox needs privileges that containers lack; the pages are ours.
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-extensions"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=arguments, timeout=PATIENCE
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The shipped model, one with languages, one without a tokenizer."""
    speaking = make_m2m_model(tmp_path_factory.mktemp("speaking"))
    ids = make_tutorial_model(tmp_path_factory.mktemp("ids"))
    models = (f"g2p-en={ROOT / 'weights' / 'g2p-en'}", f"speaking={speaking}", f"ids={ids}")
    with serving(*(word for model in models for word in ("--model", model))) as server:
        yield server.url


class Visit:
    """A page opened by a browser of a size, and what the browser complained of."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.context.set_default_timeout(PATIENCE)
        self.page = context.new_page()
        self.complaints: list[str] = []
        # What a policy forbids is told as an error on the console too.
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(request.url))
        self.requested: list[str] = []
        self.page.on("request", lambda request: self.requested.append(request.url))

    def _hear(self, message: Any) -> None:
        # A refusal's status is on the console by the browser's own doing.
        if message.type in ("error", "warning") and "status of 4" not in message.text:
            self.complaints.append(message.text)

    def run(self, source: str) -> None:
        """Type a source, and wait for the whole answer."""
        self.page.fill("#source", source)
        self.page.click("#run")
        self.wait_for_answer()

    def set(self, parameter: str, value: str) -> None:
        """Fill in a parameter, in whatever group it is."""
        field = f"#parameter-{parameter}"
        closed = self.page.locator(f"details:not([open]):has({field}) > summary")
        if closed.count():
            closed.click()
        self.page.fill(field, value)

    def wait_for_answer(self) -> None:
        self.page.locator("#status", has_text=" tokens").wait_for()
        self.page.locator("#run").wait_for()

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]


@pytest.fixture
def visit(browser: Any, url: str, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """The page, at a desktop's size unless a test is parametrized with another.

    Raises:
        AssertionError: the browser complained, or asked another host.
    """
    size = getattr(request, "param", "desktop")
    context = browser.new_context(viewport=SIZES[size], reduced_motion="reduce")
    visit = Visit(context)
    visit.page.goto(f"{url}/")
    visit.page.locator("#server", has_text="weights").wait_for()
    yield visit
    context.close()
    assert visit.complaints == []
    assert [asked for asked in visit.requested if not asked.startswith((url, "data:"))] == []


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: into the documentation if `PICTURES` says so."""
    folder = os.environ.get("PICTURES")
    return ROOT / folder if folder else tmp_path_factory.mktemp("pictures")
