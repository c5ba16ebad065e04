"""The built site in a browser: from the home page to an answer, copied commands, the search, and screens of a phone."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from fences import ROOT
from scripts import load_script

pytest.importorskip("PIL", reason="pillow is not installed")
pytestmark = pytest.mark.slow
SITE = os.environ.get("BUILT_SITE")
"""A site that is built already, as in CI; else the tests build it."""
GPT = ("select", "examples/models/gpt-oss-20b.json", "--device", "h100")
SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
"""A model that is none of the examples."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    if SITE:
        return Path(SITE)
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", str(ROOT / "mkdocs.yml"), "-d", str(folder)]
    subprocess.run(build, check=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def screenshots() -> Any:
    return load_script(ROOT / "docs/screenshots.py")


@pytest.fixture(scope="module")
def address(site: Path, screenshots: Any) -> Iterator[str]:
    with screenshots.served(site) as found:
        yield found


@pytest.fixture
def home(address: str, browser: Any) -> Iterator[Any]:
    """A tab with the home page, which may read what was copied."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto(address)
    yield tab
    context.close()


def choose(home: Any, model: str, gpu: str) -> Any:
    """The tab, gone from the home page to the answer for a model on a GPU."""
    home.get_by_role("link", name="Choose a model, a GPU and a KV dtype").click()
    home.get_by_role("combobox", name="Model").select_option(model)
    home.get_by_role("combobox", name="GPU").select_option(gpu)
    return home


def test_a_reader_goes_from_the_home_page_to_the_answer_for_a_model_of_their_own(home: Any) -> None:
    tab = choose(home, "my own config.json", "A100 (sm80)")
    tab.get_by_label("config.json of your model").fill(json.dumps(SMALL_LLAMA))
    assert tab.locator("#sentence").inner_text() == (
        "On an A100 with a bfloat16 cache, your model runs on FLASH_ATTN_2 in prefill and FLASHINFER in decode."
    )
    notes = tab.locator("#model-notes").inner_text()
    (install,) = re.findall("To install beside attnplug: pip install (.*)", notes)
    assert sorted(shlex.split(install)) == ["flash-attn>=2.7,<3", "flashinfer-python>=0.5,<0.8"]


def test_gpt_oss_on_an_h100_has_the_same_words_in_console_grid_and_page(home: Any, site: Path) -> None:
    command = [sys.executable, "-m", "attnplug", *GPT]
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    printed = subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True)
    rows = [line.split("  ") for line in printed.stdout.splitlines() if line.endswith(" 16")]
    cells = [[each.strip() for each in row if each.strip()] for row in rows]
    console = {row[4]: (row[5], row[6]) for row in cells}
    assert len(console) == 2
    shown = home.locator(".highlight", has_text=" ".join(GPT)).first.inner_text()
    assert all(" ".join(row) in " ".join(shown.split()) for row in cells)
    letters = printed.stdout.partition("R = TRITON")[2].splitlines()[0]
    assert f"R = TRITON{letters}" in shown
    assert in_grid(site / "assets" / "model-grid-light.svg", "gpt-oss-20b", "H100") == console
    tab = choose(home, "gpt-oss-20b", "H100 (sm90)")
    legend = tab.locator("#strip-legend").inner_text().splitlines()
    assert legend == [
        f"{name[-1] if name[-1].isdigit() else 'R'}{name}{phase}: 12 layers, {kind}"
        for kind, pair in console.items()
        for name, phase in zip(
            pair, (" in prefill", " in decode") if len({*pair}) > 1 else ("",), strict=False
        )
    ]
    assert tab.locator("#command").inner_text().startswith(f"attnplug {' '.join(GPT)}")


def in_grid(picture: Path, model: str, gpu: str) -> dict[str, tuple[str, str]]:
    """By kind of layers, the backends of prefill and decode that the grid shows for a model on a GPU."""
    labels = {label: name for name, label in load_script(ROOT / "docs/model_grid.py").LABELS.items()}
    texts = [each for each in ET.parse(picture).getroot() if each.tag.endswith("}text")]
    column = next(int(each.attrib["x"]) for each in texts if each.text == gpu)
    found = {}
    for row in (each for each in texts if (each.text or "").startswith(f"{model} (")):
        beside = [each for each in texts if each.attrib["y"] == row.attrib["y"]]
        names = [labels[each.text] for each in beside if abs(int(each.attrib["x"]) - column) < 50]
        found[row.text.partition("(")[2].rstrip(")")] = (names[0], names[-1])
    return found


SESSION = """import attnplug
layer = attnplug.LayerSpec(num_heads=64, num_kv_heads=8, head_size=64, sliding_window=128, has_sinks=True)
attnplug.select(layer, "h100").backend"""


@pytest.mark.parametrize(
    ("page", "words", "copied"),
    [
        ("", "--device h100", f"attnplug {' '.join(GPT)}"),
        ("", ">>> import attnplug", SESSION),
        ("guides/troubleshooting/", "list --no-load", "attnplug list --no-load"),
    ],
)
def test_the_copy_button_leaves_out_prompts_and_output(
    home: Any, address: str, page: str, words: str, copied: str
) -> None:
    home.goto(address + page)
    home.locator(".highlight", has_text=words).first.get_by_role("button").first.click()
    home.get_by_text("Copied to clipboard").wait_for()
    assert home.evaluate("navigator.clipboard.readText()") == copied


@pytest.mark.parametrize(("words", "first"), [("sinks not supported", "sink"), ("head_size", "head_size")])
def test_the_search_finds_the_sentence_of_a_refusal_first(home: Any, words: str, first: str) -> None:
    home.get_by_role("textbox", name="Search").fill(words)
    found = home.locator(".md-search-result__item").first
    found.wait_for()
    links = [each.get_attribute("href") for each in found.locator("a").all()[:2]]
    assert links[0].partition("?")[0].endswith("/guides/troubleshooting/")
    assert links[1].endswith(f"#{first}")


@pytest.mark.parametrize("width", [390, 1280])
def test_no_screen_is_wider_than_its_device(address: str, browser: Any, screenshots: Any, width: int) -> None:
    tab = browser.new_page(viewport={"width": width, "height": screenshots.SIZES[width]})
    for page in screenshots.PAGES.values():
        tab.goto(address + page)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, page
    tab.close()
