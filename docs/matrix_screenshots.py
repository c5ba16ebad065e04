"""Takes the pictures of the page of compatibility: `python docs/matrix_screenshots.py`, with playwright and chromium."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from matrix import ROOT, docs_matrix
from playwright.sync_api import sync_playwright

from attnplug.matrix.html import render_html

ASSETS = ROOT / "docs" / "assets"
SIZES = {1280: 900, 390: 844}
"""Widths and heights in pixels: of a laptop and of a phone."""


def take() -> None:
    """Take a picture of the page at each size, in light and in dark."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder, "matrix.html")
        page.write_text(render_html(docs_matrix()), encoding="utf-8")
        # The sandbox of chromium needs what containers often withhold; the page is our own.
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        for width, height in SIZES.items():
            for scheme in ("light", "dark"):
                tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                tab.goto(page.as_uri())
                tab.screenshot(path=ASSETS / f"matrix-{width}-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    take()
