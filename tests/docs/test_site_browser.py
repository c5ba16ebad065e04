"""From the home page of the built site to "which backend, and what do I install" for a pasted config.json."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fences import ROOT
from scripts import load_script

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

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


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_reader_goes_from_the_home_page_to_the_answer_for_a_model_of_their_own(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", str(ROOT / "mkdocs.yml"), "-d", str(site)]
    subprocess.run(build, check=True, cwd=ROOT)
    with (
        load_script(ROOT / "docs/screenshots.py").served(site) as address,
        playwright_api.sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(address)
        tab.get_by_role("link", name="Choose a model, a GPU and a KV dtype").click()
        tab.get_by_role("combobox", name="Model").select_option("my own config.json")
        tab.get_by_role("combobox", name="GPU").select_option("A100 (sm80)")
        tab.get_by_label("config.json of your model").fill(json.dumps(SMALL_LLAMA))
        assert tab.locator("#sentence").inner_text() == (
            "On an A100 with a bfloat16 cache, your model runs on FLASHINFER."
        )
        notes = tab.locator("#model-notes").inner_text()
        assert "To install beside attnplug: pip install 'flashinfer-python>=0.5,<0.8'" in notes
        browser.close()
