"""Models by their id on the Hugging Face Hub: from `org/name@revision` to a directory.

What is fetched lies in the cache that other programs share (`HF_HOME`), and is fetched once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = (
    "config.json",
    "generation_config.json",
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "source.spm",
    "source_tokenizer.json",
    "source_tokenizer.spm",
    "special_tokens_map.json",
    "spiece.model",
    "target.spm",
    "target_tokenizer.json",
    "target_tokenizer.spm",
    "target_vocab.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
"""What a model directory may hold beside weights. No code, and no model card."""

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
SHARDS = ("model-*-of-*.safetensors",)
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")


class HubError(OSError):
    """A model that cannot be fetched, with the reason for a person."""


ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub.

    Attributes:
        repository: `org/name`.
        revision: branch, tag or commit; None is the main branch.
    """

    repository: str
    revision: str | None = None

    @property
    def name(self) -> str:
        """What it is called where nobody names it."""
        return self.repository.partition("/")[2]

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


Location = Path | HubModel
"""Where a model is."""


def locate(text: str) -> Location:
    """A directory, or else what reads like a model's id on the Hub.

    >>> locate("org/name@v1")
    HubModel(repository='org/name', revision='v1')
    """
    directory = Path(text).expanduser()
    found = None if directory.exists() else ID.fullmatch(text)
    return HubModel(*found.groups()) if found else directory


def directory_of(location: Location) -> Path:
    """Where a model's files are, which are fetched first if it is on the Hub.

    Raises:
        HubError: they cannot be fetched; the message says why.
    """
    return location if isinstance(location, Path) else fetch(location)


def fetch(model: HubModel) -> Path:
    """The directory of a model, from the cache where it is there, otherwise from the Hub.

    Raises:
        HubError: there is no such model, it may not be read, or nothing can be fetched.
    """
    hub = _package(model)
    try:
        directory = _download(hub, model, model.revision, *FILES, *SAFETENSORS, *SHARDS)
        if not any((directory / name).exists() for name in SAFETENSORS):
            _download(hub, model, directory.name, *PICKLED)  # of the commit that the rest is of
    except hub.errors.GatedRepoError as error:
        raise HubError(
            f"{model}: the Hub gives it only to those who have accepted its terms there: do so, "
            "and set HF_TOKEN"
        ) from error
    except hub.errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{model}: neither a directory nor a model on the Hub, unless it is private: for one "
            "of those set HF_TOKEN"
        ) from error
    except hub.errors.RevisionNotFoundError as error:
        raise HubError(f"{model}: {model.repository} has no such revision") from error
    except hub.errors.LocalEntryNotFoundError as error:
        raise HubError(_unreachable(hub, model)) from error
    except (OSError, ValueError, hub.errors.HTTPError) as error:
        raise HubError(f"{model}: cannot be fetched from the Hub: {error}") from error
    return directory


def _package(model: HubModel) -> Any:
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise HubError(
            f"{model}: no such directory; to look for it on the Hugging Face Hub, the package "
            f'{error.name} is missing, which comes with the extra "hub"'
        ) from error
    return huggingface_hub


def _download(hub: Any, model: HubModel, revision: str | None, *patterns: str) -> Path:
    found = hub.snapshot_download(model.repository, revision=revision, allow_patterns=patterns)
    return Path(found)


def _unreachable(hub: Any, model: HubModel) -> str:
    constants = hub.constants
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} is away"
    revision = f" --revision {model.revision}" if model.revision else ""
    return (
        f"{model}: neither a directory nor (whole) in the cache {constants.HF_HUB_CACHE}, and "
        f"{why}; where there is a network, fetch it with: "
        f"hf download {model.repository}{revision}"
    )
