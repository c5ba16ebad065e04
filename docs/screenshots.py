"""Takes the pictures of the site: `python docs/screenshots.py`, with mkdocs, playwright, pillow and chromium."""

from __future__ import annotations

import functools
import http.server
import io
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
PAGES = {
    "home": "",
    "guide": "guides/choose-a-backend/",
    "model": "which-backend.html#model=gpt-oss-20b&gpu=a100&kv=fp8",
    "matrix": "reference/matrix.html",
    "performance": "performance/",
}
"""The addresses of the pages by the names of their pictures."""
SIZES = {1280: 900, 390: 844}
"""Widths and heights in pixels: of a laptop and of a phone."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are not printed."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder, on a free port of this machine."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def take(site: Path) -> None:
    """Take a picture of each page of a built site at each size, in light and in dark."""
    with served(site) as address, sync_playwright() as playwright:
        # The sandbox of chromium needs what containers often withhold; the site is our own.
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        for width, height in SIZES.items():
            for scheme in ("light", "dark"):
                tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                for name, page in PAGES.items():
                    tab.goto(address + page, wait_until="networkidle")
                    save(tab.screenshot(), ASSETS / f"{name}-{width}-{scheme}.png")
                tab.close()
        browser.close()


def save(picture: bytes, path: Path) -> None:
    """Write a picture with a palette of 256 colours, a third of its size; small marks keep their colours."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    method = Image.Quantize.MAXCOVERAGE
    image.quantize(256, method, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Build the site and take the pictures; a folder in the command line is a site that is built already."""
    if sys.argv[1:]:
        take(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", str(ROOT / "mkdocs.yml"), "-d", folder]
        subprocess.run(build, check=True, cwd=ROOT)  # noqa: S603  (our own interpreter)
        take(Path(folder))


if __name__ == "__main__":
    main()
