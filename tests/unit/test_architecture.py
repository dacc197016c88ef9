"""Who may import whom: `service` knows HTTP, `model` knows tensors, `seqserve` knows neither."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"model", "service", "seqserve"}
EXTRAS = PROJECT["optional-dependencies"]
OPTIONAL = {
    "check": "service/check.py",
    "hub": "service/hub.py",
    "otel": "service/tracing.py",
    "progress": "seqserve/mapping.py",
}
SERVED = ["server", "ray", *OPTIONAL]
ON_RAY = ROOT / "service" / "cluster"
# Imported by name, and guaranteed by the dependency that is built on them or called otherwise.
COMES_WITH = {
    "annotated_types": "pydantic",
    "opentelemetry": "opentelemetry_sdk",
    "iso639": "iso639_lang",
    "starlette": "fastapi",
}


def imports(package: str, *, at_once: bool = False) -> set[str]:
    """What a package's files import: anywhere in them, or only on being imported themselves."""
    files = (ROOT / package).rglob("*.py")
    return set().union(*(imports_of(path, at_once=at_once) for path in files))


def imports_of(path: Path, *, at_once: bool = False) -> set[str]:
    """What one file imports."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(), path)
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}: relative import"
            found.add(node.module)
    return found


def packages(modules: set[str]) -> set[str]:
    """The packages, ours or installed, that modules belong to."""
    names = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    return {COMES_WITH.get(name, name) for name in names}


def declared(*lists: list[str]) -> set[str]:
    names = {re.split(r"[>\[]", requirement)[0] for each in lists for requirement in each}
    return {name.replace("-", "_") for name in names}


def test_model_imports_nothing_of_ours_but_the_parameters() -> None:
    ours = {module for module in imports("model") if packages({module}) & {"seqserve", "service"}}
    assert ours <= {"seqserve.parameters"}


def test_model_knows_no_http() -> None:
    assert not packages(imports("model")) & {"fastapi", "httpx", "uvicorn"}


def test_the_sdk_imports_no_model_and_no_service() -> None:
    assert packages(imports("seqserve")) & OURS <= {"seqserve"}


def test_the_sdk_needs_only_its_own_dependencies_to_be_imported() -> None:
    needed = packages(imports("seqserve", at_once=True)) - OURS
    assert needed <= declared(PROJECT["dependencies"])


def test_every_import_is_a_declared_dependency() -> None:
    imported = set().union(*(packages(imports(package)) for package in OURS)) - OURS
    assert imported <= declared(PROJECT["dependencies"], *(EXTRAS[name] for name in SERVED))


@pytest.mark.parametrize(("extra", "only"), OPTIONAL.items())
def test_an_optional_package_is_imported_by_one_file_and_only_when_needed(
    extra: str, only: str
) -> None:
    wanted = declared(EXTRAS[extra])
    files = [path for package in OURS for path in (ROOT / package).rglob("*.py")]
    assert [path for path in files if packages(imports_of(path)) & wanted] == [ROOT / only]
    assert not packages(imports_of(ROOT / only, at_once=True)) & wanted


def test_ray_is_imported_only_to_serve_on_it() -> None:
    files = [path for package in OURS for path in (ROOT / package).rglob("*.py")]
    with_ray = {path for path in files if "ray" in packages(imports_of(path))}
    assert with_ray == {ON_RAY / "command.py", ON_RAY / "deployments.py"}
    assert "ray" not in packages(imports_of(ON_RAY / "command.py", at_once=True))
    at_once = set().union(*(imports_of(path, at_once=True) for path in files))
    assert "service.cluster.deployments" not in at_once
