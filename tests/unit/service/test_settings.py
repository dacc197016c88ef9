"""Settings from the environment and the command line; every one documented."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from model.config import EngineConfig
from service.cli import SCALING, SERVING
from service.cluster.arguments import Arguments
from service.hub import HubModel
from service.settings import Pair, Settings, engine_config, named_model

DOCS = Path(__file__).parents[3] / "docs" / "settings.md"
OPERATIONS = DOCS.with_name("operations.md")


def test_defaults_listen_only_locally() -> None:
    settings = Settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert list(settings.locations) == ["g2p-en"]


def test_the_environment_sets_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_PORT", "9000")
    monkeypatch.setenv("SEQSERVE_MODELS", "a=./x/y, z, org/name@v1")
    monkeypatch.setenv("SEQSERVE_MAX_ROWS", "8")
    settings = Settings(max_rows=16)
    assert settings.port == 9000
    there = HubModel("org/name", "v1")
    assert settings.locations == {"a": Path("x/y"), "z": Path("z"), "name": there}
    assert settings.max_rows == 16


def test_an_empty_variable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQSERVE_PORT", "")
    assert Settings().port == 8000


@pytest.mark.parametrize(
    "values",
    [
        {"port": 70000},
        {"dtype": "int3"},
        {"timeout": 0},
        {"models": ()},
        {"unknown": 1},
        {"max_encoder_cache_bytes": -1},
        {"lookahead": -1},
        {"max_inputs": 10, "max_queue": 5},
    ],
)
def test_bad_settings_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Settings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "name", "directory"),
    [
        ("mine=./out/x", "mine", "out/x"),
        ("./out/g2p", "g2p", "out/g2p"),
        ("out/g2p/", "g2p", "out/g2p"),
        ("./a=b", "a=b", "./a=b"),
        ("n=/p/a=b", "n", "/p/a=b"),
    ],
)
def test_models_are_named(text: str, name: str, directory: str) -> None:
    assert named_model(text) == (name, Path(directory))


def test_models_of_the_hub_are_named() -> None:
    assert named_model("org/mt-en.de") == ("mt-en.de", HubModel("org/mt-en.de"))
    assert named_model("org/mt@refs/pr/1") == ("mt", HubModel("org/mt", "refs/pr/1"))
    assert named_model("mine=org/mt@v1") == ("mine", HubModel("org/mt", "v1"))


@pytest.mark.parametrize("text", ["", "=x", "x="])
def test_half_a_model_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=DIR"):
        named_model(text)


def test_pairs_are_read_and_belong_to_models() -> None:
    settings = Settings(pairs=("en-de=a", "zh_Hans-mul=b", "fr-en=a"))
    assert settings.pairs_of(["a", "b", "c"]) == {
        "a": [Pair("en", "de", "a"), Pair("fr", "en", "a")],
        "b": [Pair("zh_Hans", "mul", "b")],
        "c": [],
    }
    assert str(Pair.read("en-de=a")) == "en-de=a"
    with pytest.raises(ValueError, match="en-de=a names no model of this server; there are: x"):
        settings.pairs_of(["x"])


@pytest.mark.parametrize("text", ["", "en=a", "en-de", "en-de=", "english-de=a", "en-de-fr=a"])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="SOURCE-TARGET=NAME"):
        Settings(pairs=(text,))


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two models are called 'x'"):
        _ = Settings(models=("a/x", "b/x")).locations


@pytest.mark.parametrize(
    ("given", "path"), [("", ""), ("/", ""), ("nlp", "/nlp"), ("/a/b/", "/a/b")]
)
def test_root_paths_begin_with_a_slash_and_end_without(given: str, path: str) -> None:
    assert Settings(root_path=given).root_path == path


def test_the_engine_gets_its_share() -> None:
    share = {"max_rows": 3, "max_cache_tokens": 77, "max_encoder_cache_bytes": 0, "lookahead": 5}
    share["cuda_graphs"] = True
    assert engine_config(Settings(**share)) == EngineConfig(**share)  # type: ignore[arg-type]


def test_every_setting_and_option_is_documented() -> None:
    text = DOCS.read_text()
    for option in SERVING:
        assert f"`{option.typed}`" in text, option.typed
    for name in Settings.model_fields:
        assert f"`SEQSERVE_{name.upper()}`" in text, name


def test_keys_cannot_be_typed_on_a_command_line() -> None:
    names = {option.name for option in SERVING}
    assert Settings.model_fields.keys() - names == {"api_keys"}


def test_every_limit_is_in_the_operator_s_list() -> None:
    limits = OPERATIONS.read_text().split("\n## Limits\n")[1].split("\n## ")[0]
    for option in SERVING:
        if option.name.startswith("max_"):
            assert f"`{option.typed}`" in limits, option.typed


def test_the_options_about_replicas_are_documented() -> None:
    for option in SCALING:
        assert f"| `{option.typed}` |" in DOCS.read_text()


def test_the_arguments_of_the_application_on_ray_are_documented() -> None:
    scaling = DOCS.with_name("scaling.md").read_text()
    for name in Arguments.model_fields:
        assert f"| `{name}` |" in scaling
