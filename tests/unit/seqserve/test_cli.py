"""The launcher, with and without a server to launch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from seqserve import __version__, cli


def test_a_bare_sdk_says_how_to_get_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert "service.cli is missing" in str(ended.value)
    assert "make setup" in str(ended.value)


def test_a_bare_sdk_knows_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "service", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "service.cli", None)
    monkeypatch.setattr(sys, "argv", ["seqserve", "--version"])
    cli.main()
    assert capsys.readouterr().out == f"seqserve {__version__}\n"


def test_with_a_server_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr("service.cli.main", lambda: started.append(True))
    cli.main()
    assert started == [True]
