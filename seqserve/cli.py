"""The command `seqserve`: a launcher for `service.cli`, which a bare SDK install does not have."""

from __future__ import annotations

import importlib
import sys

from seqserve import __version__

HOW_TO_GET_THE_SERVER = """\
seqserve: the server is not installed here ({missing} is missing), only the client library.
It runs from a checkout or from the container image:

  git clone <repository> && cd seqserve && make setup && .venv/bin/seqserve serve
  docker run -p 8000:8000 seqserve
"""


def main() -> None:
    """Run the command line; without the server's packages, say how to get them."""
    try:
        cli = importlib.import_module("service.cli")
    except ModuleNotFoundError as error:
        if sys.argv[1:] == ["--version"]:
            print(f"seqserve {__version__}")
            return
        sys.exit(HOW_TO_GET_THE_SERVER.format(missing=error.name))
    cli.main()
