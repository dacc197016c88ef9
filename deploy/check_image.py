#!/usr/bin/env python3
"""Run an image of buildah's as an orchestrator would, and look whether it keeps its promises.

    sudo deploy/check_image.py [IMAGE]

The image's own command runs as its own user, process 1 of a namespace, without capabilities, on a
root that is mounted read-only with nothing but /tmp to write to. Then: the image's health check, a
generate call, and SIGTERM in the middle of a long request, which must still be answered before the
process ends with status 0.

Namespaces come from util-linux, because runtimes ask more of the kernel than a container that
builds images may have. So the network is the host's, and there is no seccomp profile.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILDAH = ("buildah", "--storage-driver", "vfs")

LONG = {"inputs": ["internationalisation", "otorhinolaryngology"] * 256}
"""Takes half a second on a fast machine, half a minute on a slow one."""

SETTINGS = ["SEQSERVE_GRACE=300"]
"""So that the long request is done in time everywhere."""

MOUNTS = """
set -eu
mount --bind "$ROOT" "$ROOT"
mount -o remount,bind,ro "$ROOT"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
"""


@dataclass(frozen=True)
class Container:
    """An image's files and what it says of how to run them.

    Attributes:
        root: where its files are.
        config: of the image, in Docker's format.
        port: where the server is to listen.
    """

    root: Path
    config: dict[str, Any]
    port: int

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs `arguments` in the container, as its user."""
        user = self.config["User"]
        rights = ["--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        variables = [*self.config["Env"], f"SEQSERVE_PORT={self.port}", *SETTINGS]
        return [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
            *("sh", "-c", MOUNTS + 'exec chroot "$ROOT" "$@"', "sh"),
            *("setpriv", f"--reuid={user}", f"--regid={user}", *rights),
            *("env", "-i", "-C", self.config["WorkingDir"], *variables, *arguments),
        ]

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Run `arguments` in the container."""
        environment = {**os.environ, "ROOT": str(self.root)}
        return subprocess.Popen(self.command(*arguments), env=environment, text=True, **options)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Status and output of a command that ends by itself."""
        process = self.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def ask(self, path: str, body: object = None) -> tuple[int, str]:
        """Status and body of an answer of the server."""
        url = f"http://127.0.0.1:{self.port}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextlib.contextmanager
def container_of(image: str) -> Iterator[Container]:
    """The image's files, unpacked while they are needed."""
    inspected = buildah("inspect", "--type", "image", image)
    name = buildah("from", image)
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        root = Path(buildah("mount", name))
        yield Container(root, json.loads(inspected)["Docker"]["config"], port)
    finally:
        buildah("rm", name)


def buildah(*arguments: str) -> str:
    """What a command of buildah's prints."""
    command = [*BUILDAH, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 120) -> None:
    """Raises TimeoutError: the condition has not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)


def check(what: str, kept: bool, found: object = "") -> None:
    """Raises AssertionError: the promise is not kept."""
    if not kept:
        raise AssertionError(f"{what}: {found}")
    print(f"ok: {what}", flush=True)


def check_rights(container: Container) -> None:
    """What a process in the container may do."""
    _, status = container.run("cat", "/proc/self/status")
    rights = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    ids = {*rights["Uid"].split(), *rights["Gid"].split()}
    check("user and group are 10001", ids == {"10001"}, status)
    capabilities = {rights[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")}
    check("there are no capabilities", capabilities == {"0" * 16}, status)
    for place in ("/", "/app", "/opt/venv", "/models"):
        code, output = container.run("touch", f"{place}/written")
        check(f"{place} is read-only", code != 0 and "Read-only file system" in output, output)


def check_server(container: Container) -> None:
    """What the image's command does when it is started, asked and ended."""
    entry = [*container.config["Entrypoint"], *container.config["Cmd"]]
    server = container.start(*entry)
    try:
        wait_for("ready", lambda: server.poll() is not None or ready(container))
        check("it gets ready", server.poll() is None, server.returncode)
        code, output = container.run(*container.config["Healthcheck"]["Test"][1:])
        check("its health check passes", code == 0, output)
        status, body = container.ask("/generate", {"inputs": "hello"})
        check("it generates", status == 200 and json.loads(body)["generated_text"], body)
        check_drain(container, server)
    finally:
        server.kill()


def check_drain(container: Container, server: subprocess.Popen[str]) -> None:
    """SIGTERM while a request runs."""
    answers: list[tuple[int, str]] = []
    caller = threading.Thread(target=lambda: answers.append(container.ask("/generate", LONG)))
    caller.start()
    wait_for("the long request is running", lambda: rows(container) > 0)
    os.kill(process_1(server), signal.SIGTERM)
    wait_for("/ready turns 503", lambda: not ready(container), 10)
    status, body = container.ask("/generate", {"inputs": "hello"})
    check("after SIGTERM it is not ready and refuses requests", status == 503, body)
    check("the request still runs", not answers, answers)
    caller.join(300)
    status, body = answers[0]
    check("then it is answered", status == 200, body)
    texts = [answer["generated_text"] for answer in json.loads(body)]
    check("in full", len(texts) == len(LONG["inputs"]) and all(texts), body)
    check("and the process ends with status 0", server.wait(30) == 0, server.returncode)


def process_1(server: subprocess.Popen[str]) -> int:
    """The id, out here, of the process that is 1 in the container: the child of `unshare`."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return int(children[0])


def rows(container: Container) -> float:
    """Rows that are being decoded."""
    (line,) = re.findall(r"^seqserve_rows\{.*\} (\S+)$", container.ask("/metrics")[1], re.MULTILINE)
    return float(line)


def ready(container: Container) -> bool:
    try:
        return container.ask("/ready")[0] == 200
    except OSError:
        return False


def main(image: str) -> None:
    """Raises an error at the first promise that is not kept."""
    with container_of(image) as container:
        check_rights(container)
        check_server(container)
    print(f"{image} keeps its promises")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "seqserve")
