"""Models by their id on the Hub, through the real client: its cache, and a server like the Hub."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from model.loader import load_model
from service.app import create_app
from service.cli import app
from service.hub import FILES, PICKLED, SAFETENSORS, SHARDS, HubError, HubModel, locate
from service.settings import Settings
from tests.builders import make_native_model

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_native_model(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module", autouse=True)
def client() -> None:
    pytest.importorskip("huggingface_hub", reason="the client of the Hub is not installed")


def fetch_all(*ids: str, **variables: str) -> list[str]:
    """What a process that starts with these variables makes of ids: directories, or errors."""
    code = """if True:
        import json, sys
        from service.hub import HubError, fetch, locate
        def result(id):
            try:
                return str(fetch(locate(id)))
            except HubError as error:
                return f"error: {error}"
        print(json.dumps([result(id) for id in sys.argv[1:]]))"""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *ids],
        env={**kept, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


# --- ids -----------------------------------------------------------------------------------------


def test_a_directory_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate("org/name") == HubModel("org/name")
    Path("org/name").mkdir(parents=True)
    assert locate("org/name") == Path("org/name")


@pytest.mark.parametrize("text", ["name", "./org/name", "/org/name", "a/b/c", "../b", "~/b", "a/"])
def test_what_reads_like_a_path_is_none(text: str) -> None:
    assert locate(text) == Path(text).expanduser()


def test_every_file_that_the_loader_reads_is_fetched() -> None:
    named = set()
    for path in (ROOT / "model").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"^[a-z_.]+\.(?:json|txt|model|spm|bin)$", node.value))
    assert {"config.json", "merges.txt", "spiece.model", "target.spm"} <= named
    written_only = {"training.json"}
    patterns = [*FILES, *SAFETENSORS, *SHARDS, *PICKLED]
    missed = {name for name in named if not any(fnmatch(name, each) for each in patterns)}
    assert missed <= written_only


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for arguments in (["info", "org/name"], ["generate", "--model", "org/name", "a"]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1
        assert "org/name: no such directory; to look for it on the Hugging Face" in done.stderr
        assert 'the extra "hub"' in done.stderr


# --- the cache -----------------------------------------------------------------------------------


def cached(cache: Path, repository: str, model: Path) -> Path:
    """Lay a model down as the client's cache does: links into a folder of blobs."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    snapshot, blobs = folder / "snapshots" / COMMIT, folder / "blobs"
    for directory in (snapshot, blobs, folder / "refs"):
        directory.mkdir(parents=True)
    for file in model.iterdir():
        blob = blobs / sha1(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (folder / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_without_a_network_the_cache_is_enough(model: Path, tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/name", model)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    ids = ("org/name", f"org/name@{COMMIT}", "org/name@v2", "org/other")
    by_name, by_commit, *errors = fetch_all(*ids, **offline)
    assert by_name == by_commit == str(snapshot)
    for error, id, command in zip(
        errors, ids[2:], ("org/name --revision v2", "org/other"), strict=True
    ):
        assert error.startswith(f"error: {id}: neither a directory nor (whole) in the cache")
        assert f"{tmp_path}, and HF_HUB_OFFLINE is set" in error
        assert error.endswith(f"fetch it with: hf download {command}")
    ours, theirs = load_model(snapshot, "cpu"), load_model(model, "cpu")
    for name, tensor in theirs.network.named_parameters():
        assert torch.equal(ours.network.get_parameter(name), tensor)


def test_shards_that_are_links_are_read(model: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    shard = "model-00001-of-00001.safetensors"
    for file in model.iterdir():
        name = shard if file.name == "model.safetensors" else file.name
        (sharded / name).write_bytes(file.read_bytes())
    index = {"weight_map": dict.fromkeys(load_file(sharded / shard), shard)}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    snapshot = cached(tmp_path / "cache", "org/name", sharded)
    assert (snapshot / shard).is_symlink()
    assert load_model(snapshot, "cpu").parameters == load_model(model, "cpu").parameters


# --- a server ------------------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """Speaks as much of the Hub's protocol as its client needs to fetch files.

    Attributes:
        repositories: by id, the files of the one commit.
        asked: paths of the files that were asked for.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories = repositories
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.lstrip("/")
        if path.startswith("api/models/"):
            org, name, *rest = path.removeprefix("api/models/").split("/")
            self.describe(f"{org}/{name}", rest)
        else:
            org, name, _, _, file = path.split("/", 4)
            self.server.asked.append(file)
            self.send(self.server.repositories[f"{org}/{name}"][file], file)

    def describe(self, repository: str, rest: list[str]) -> None:
        if repository == "org/gated":
            return self.refuse(403, "GatedRepo")
        if repository not in self.server.repositories:
            return self.refuse(404, "RepoNotFound")
        files = self.server.repositories[repository]
        kind, revision = rest[:2] if rest else ("revision", "main")
        if revision not in ("main", "v1", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        listing = [{"rfilename": name} for name in files]
        about: Any = {"id": repository, "sha": COMMIT, "siblings": listing}
        if kind == "tree":
            about = [
                {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
                for name, data in files.items()
            ]
        return self.send(json.dumps(about).encode())

    def send(self, data: bytes, file: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/octet-stream" if file else "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{sha1(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub_of(repositories: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    with Hub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def test_what_is_read_is_fetched_and_nothing_else(model: Path, tmp_path: Path) -> None:
    read = {file.name: file.read_bytes() for file in model.iterdir()}
    others = dict.fromkeys(("README.md", "own.py", "pytorch_model.bin", "tf_model.h5"), b"x")
    pickled = {"config.json": b"{}", "pytorch_model.bin": b"y", "training_args.bin": b"z"}
    with hub_of({"org/name": {**read, **others}, "org/old": pickled}) as hub:
        where = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path)}
        new, old, *errors = fetch_all(
            "org/name@v1", "org/old", "org/none", "org/name@v9", "org/gated", **where
        )
        assert {path.name for path in Path(new).iterdir()} == read.keys()
        assert {path.name for path in Path(old).iterdir()} == {"config.json", "pytorch_model.bin"}
        assert set(hub.asked) == {*read, "config.json", "pytorch_model.bin"}
    assert load_model(Path(new), "cpu").parameters == load_model(model, "cpu").parameters
    for error, message in zip(
        errors,
        (
            "org/none: neither a directory nor a model on the Hub, unless it is private",
            "org/name@v9: org/name has no such revision",
            "org/gated: the Hub gives it only to those who have accepted its terms",
        ),
        strict=True,
    ):
        assert error.startswith(f"error: {message}")
    again, gone = fetch_all("org/name@v1", "org/none", **where)
    assert again == new  # from the cache
    assert f"and {hub.url} is away" in gone


# --- who uses it ---------------------------------------------------------------------------------


@pytest.fixture
def fetched(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[HubModel]:
    """Ids that were fetched, all of them being the one model."""
    asked: list[HubModel] = []

    def fetch(wanted: HubModel) -> Path:
        asked.append(wanted)
        if wanted.repository != "org/name":
            raise HubError(f"{wanted}: gone")
        return model

    monkeypatch.setattr("service.hub.fetch", fetch)
    return asked


def test_the_commands_take_ids(fetched: list[HubModel], model: Path) -> None:
    run = CliRunner().invoke
    assert json.loads(run(app, ["info", "org/name@v1", "--json"]).stdout)["directory"] == str(model)
    assert run(app, ["generate", "--model", "org/name", "--device", "cpu", "a"]).exit_code == 0
    assert "know the family seqserve" in run(app, ["check", "org/name"]).stderr
    assert fetched == [HubModel("org/name", "v1"), HubModel("org/name"), HubModel("org/name")]
    done = run(app, ["info", "org/other"])
    assert done.exit_code == 1
    assert done.stderr == "seqserve: org/other: gone\n"


@pytest.mark.anyio
async def test_a_server_takes_ids(fetched: list[HubModel]) -> None:
    application = create_app(Settings(models=("org/name", "org/other"), device="cpu"))
    models = application.state.models
    assert models.names == ["name", "other"]
    await models.load()
    assert [served.name for served in models.served] == ["name"]
    assert models.info()[1].error == "org/other: gone"
    await models.stop()
