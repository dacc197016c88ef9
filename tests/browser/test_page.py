"""What a person does on the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from seqserve import Client
from tests.e2e.conftest import ROOT, serving

from .conftest import PATIENCE, Visit


def test_tokens_come_with_probabilities_and_alternatives(visit: Visit, url: str) -> None:
    visit.run("colonel")
    with Client(url) as client:
        answer = client.generate("colonel", {"top_n_tokens": 8})
    assert answer.details
    assert visit.page.inner_text("#answer") == answer.generated_text
    assert visit.texts(".token .text") == [token.text.strip() for token in answer.details.tokens]
    for percent in visit.texts(".token .percent"):
        assert re.fullmatch(r"[\d.]+ %", percent)
    visit.page.hover(".token:nth-child(2)")
    assert len(visit.texts(".alternative")) == 8
    assert visit.texts(".alternative[aria-current] .text") == ["✓ AA"]


def test_an_alternative_goes_on_without_the_encoder(visit: Visit, url: str) -> None:
    visit.run("colonel")
    with Client(url) as client:
        before = client.info().models[0].encoder_cache
        visit.page.hover(".token:nth-child(2)")
        visit.page.get_by_role("button", name=re.compile("^AH,.*continue from here")).click()
        visit.page.locator(".token.chosen").wait_for()
        visit.wait_for_answer()
        after = client.info().models[0].encoder_cache
        ids = client.tokenize("K AH", side="target").ids[:2]
        expected = client.generate(
            "colonel", {"target_prefix_ids": ids, "return_full_text": True}
        ).generated_text
    assert visit.page.inner_text("#answer") == expected
    assert visit.texts(".token .text")[:2] == ["K", "AH"]
    assert before
    assert after
    assert after.misses == before.misses
    assert after.hits > before.hits


def test_the_keyboard_is_enough(visit: Visit) -> None:
    visit.page.focus("#source")
    visit.page.keyboard.press("ControlOrMeta+a")
    visit.page.keyboard.type("cat")
    visit.page.keyboard.press("Enter")
    visit.wait_for_answer()
    visit.page.focus(".token")
    visit.page.keyboard.press("ArrowRight")
    assert visit.page.locator(".token:nth-child(2)").get_attribute("aria-expanded") == "true"
    visit.page.keyboard.press("Enter")
    visit.page.keyboard.press("ArrowDown")
    assert visit.page.evaluate("document.activeElement.className") == "alternative"
    visit.page.keyboard.press("Escape")
    assert visit.page.locator(".alternatives").is_hidden()
    assert visit.page.evaluate("document.activeElement.className").startswith("token")
    visit.page.focus("#tab-tokens")
    visit.page.keyboard.press("ArrowRight")
    visit.page.locator(".heat").wait_for()
    visit.page.focus(".heat")
    visit.page.keyboard.press("ArrowUp")
    assert "AE looks at" in visit.page.inner_text(".readout")


def test_attention_is_what_the_server_says(visit: Visit, url: str) -> None:
    visit.run("cat")
    visit.page.click("#tab-attention")
    visit.page.locator(".heat").wait_for()
    with Client(url) as client:
        attention = client.attention("cat", "K AE T")
    layers, heads, rows, columns = attention.cross.shape
    assert visit.page.locator(".thumbnail").count() == layers * heads
    visit.page.get_by_label("Layer 2, head 3").click()
    visit.page.click(".numbers summary")
    numbers = [float(text) for text in visit.texts(".numbers tbody td")]
    expected = [float(f"{weight:.3f}") for weight in attention.cross[1, 2].flatten().tolist()]
    assert numbers == pytest.approx(expected, abs=0.0011)
    for kind, size in (("encoder", columns * columns), ("decoder", rows * rows)):
        visit.page.click(f"[data-kind={kind}]")
        assert len(visit.texts(".numbers tbody td")) == size


def test_beams_are_a_tree_and_each_can_be_looked_at(visit: Visit, url: str) -> None:
    visit.run("read")
    visit.page.click("#tab-beams")
    visit.page.locator(".leaf").first.wait_for()
    with Client(url) as client:
        found = client.generate("read", {"num_beams": 5, "num_return_sequences": 5}).sequences
    assert found
    leaves = visit.texts(".leaf")
    assert len(leaves) == len(found)
    note = visit.page.inner_text("#beams .hint")
    dropped = re.search(r"(\d+) dropped", note)
    assert dropped
    with Client(url) as client:
        told = client.generate("read", {"num_beams": 5, "beam_steps": True}).details
    assert told
    assert told.beam_steps
    assert len(visit.texts(".segment.dropped")) == int(dropped[1]) > 0
    assert len(visit.texts(".step")) == sum(map(len, told.beam_steps))
    assert visit.texts(".leaf b")[0] == "#1", "the best ways on come first"
    visit.page.uncheck("#all-beams")
    assert not visit.page.locator(".segment.dropped").first.is_visible()
    visit.page.get_by_role("button", name=re.compile("^Hypothesis 2")).click()
    assert visit.page.inner_text("#answer") == found[1].generated_text


def test_an_error_is_shown_at_its_field(visit: Visit) -> None:
    visit.set("top_p", "1.5")
    visit.page.click("#run")
    visit.page.locator("#fault").wait_for()
    message = "parameters.top_p must be in (0, 1], got 1.5"
    assert message in visit.page.inner_text("#fault")
    assert visit.page.get_attribute("#parameter-top_p", "aria-invalid") == "true"
    assert visit.page.inner_text("#parameter-top_p-fault") == message
    visit.set("top_p", "0.5")
    visit.run("cat")
    assert visit.page.locator("#fault").is_hidden()
    assert "seed" in visit.page.inner_text("#status")


def test_the_code_asks_for_the_same(visit: Visit, url: str) -> None:
    visit.page.fill("#source", "it's")
    visit.set("seed", "7")
    visit.run("it's")
    visit.page.click("#tab-code")
    command, program = visit.texts("#code code")
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:3] == ["curl", f"{url}/generate", "-d"]
    body = json.loads(words[3])
    assert body["inputs"] == "it's"
    assert body["parameters"]["seed"] == 7
    printed: list[str] = []
    exec(program, {"print": printed.append})
    assert printed == [visit.page.inner_text("#answer")]


def test_a_model_with_languages_and_one_without_a_tokenizer(visit: Visit) -> None:
    page = visit.page
    page.select_option("#model", "speaking")
    page.select_option("#src_lang", "en")
    page.select_option("#tgt_lang", "ar")
    visit.set("top_n_tokens", "5")
    visit.set("max_new_tokens", "6")
    visit.run("ab")
    assert visit.texts(".token .text")[0] == "__ar__"
    page.hover(".token:nth-child(3)")  # the language is among the ids that are kept
    page.locator(".alternative:not([aria-current])").first.click()
    page.locator(".token.chosen").wait_for()
    visit.wait_for_answer()
    assert visit.texts(".token .text")[0] == "__ar__"
    page.click("#tab-attention")
    page.locator(".heat").wait_for()
    page.click("#tab-tokens")
    page.select_option("#model", "ids")
    visit.set("max_new_tokens", "4")
    visit.run("5 6 7")
    assert len(visit.texts(".token")) == 4
    assert all(text.startswith("#") for text in visit.texts(".token .text"))


def test_text_from_right_to_left_stands_on_the_right(visit: Visit) -> None:
    visit.page.fill("#source", "مرحبا")
    direction = "getComputedStyle(document.getElementById('source')).direction"
    assert visit.page.evaluate(direction) == "rtl"


def test_the_theme_is_kept(visit: Visit) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    colours = [visit.page.evaluate(background)]
    for theme in ("light", "dark"):
        visit.page.click("#theme")
        assert visit.page.inner_text("#theme") == f"Theme: {theme}"
        colours.append(visit.page.evaluate(background))
    assert colours[0] == colours[1] != colours[2]
    visit.page.reload()
    assert visit.page.evaluate(background) == colours[2]


def test_the_live_panel_follows_the_server(visit: Visit, url: str) -> None:
    visit.run("cat")
    with Client(url) as client:
        client.generate(["cat", "dog"] * 8)
        cache = client.info().models[0].encoder_cache
    assert cache
    told = f"{cache.hits} of {cache.hits + cache.misses} hits"
    visit.page.locator("[data-figure=cache]", has_text=told).wait_for()
    visit.page.locator("[data-figure=latency]", has_text="s ·").wait_for()
    assert "64 rows" in visit.page.inner_text("[data-figure=rows]")


def test_a_key_is_asked_for_and_a_proxy_s_path_kept(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-right\n")
    model = f"m={ROOT / 'weights' / 'g2p-en'}"
    arguments = ("--model", model, "--api-keys-file", str(keys), "--root-path", "/nlp")
    with serving(*arguments) as server:
        context = browser.new_context()
        visit = Visit(context)
        visit.page.goto(f"{server.url}/nlp/")
        for key in ("sk-wrong", "sk-right"):
            visit.page.locator("#key-form").wait_for()
            visit.page.fill("#key", key)
            visit.page.click("#key-form button")
        visit.page.locator("#server", has_text="weights").wait_for()
        assert visit.page.locator("#key-form").is_hidden()
        visit.run("cat")
        assert visit.page.inner_text("#answer") == "K AE T"
        visit.page.click("#tab-code")
        assert "sk-right" not in visit.page.content()
        assert all(asked.startswith(f"{server.url}/nlp/") for asked in visit.requested)
        assert visit.complaints == []
        context.close()


@pytest.mark.parametrize("visit", ["desktop", "phone"], indirect=True)
def test_it_looks_right(
    visit: Visit, url: str, pictures: Path, request: pytest.FixtureRequest
) -> None:
    size = request.node.callspec.params["visit"]
    fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    with Client(url) as client:
        for rows in (8, 48, 24):  # something to see for the live panel
            client.generate(["something", "to", "pronounce", "meanwhile"] * (rows // 4))
            visit.page.wait_for_timeout(2000)
    visit.run("colonel")
    assert visit.page.evaluate(fits)
    visit.page.hover(".token:nth-child(2)")
    picture(visit, pictures / f"page-{size}.png")
    visit.page.keyboard.press("Escape")
    visit.page.mouse.move(0, 0)
    visit.page.click("#tab-attention")
    visit.page.locator(".heat").wait_for()
    assert visit.page.evaluate(fits)
    if size == "desktop":
        picture(visit, pictures / "page-attention.png", full_page=True)
    visit.page.click("#tab-beams")
    visit.page.locator(".leaf").first.wait_for()
    assert visit.page.evaluate(fits)
    if size == "desktop":
        visit.page.emulate_media(color_scheme="dark")
        picture(visit, pictures / "page-dark.png")


def picture(visit: Visit, path: Path, *, full_page: bool = False) -> None:
    """What a person sees, once the live panel has figures of the run."""
    visit.page.locator("[data-figure=latency]", has_text="s ·").wait_for()
    visit.page.screenshot(path=path, full_page=full_page, timeout=PATIENCE)
