"""A matrix's page opened in chromium."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attnplug.matrix import Matrix
from attnplug.matrix.html import render_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LAPTOP = {"width": 1280, "height": 900}
_RENDERED: dict[tuple[int, int, str], tuple[str, Any]] = {}


def rendered(matrix: Matrix, models: Any, links: Any) -> str:
    """The page, rendered once: many tests open the same one."""
    key = id(matrix.runs), id(models), repr(links)
    if key not in _RENDERED:
        # What has these ids is kept with the page, so that nothing else gets them.
        _RENDERED[key] = render_html(matrix, models=models, links=links), (matrix, models)
    return _RENDERED[key][0]


class Opened:
    """A matrix's page in a tab, and everything that went wrong in it."""

    def __init__(
        self,
        browser: Browser,
        folder: Path,
        matrix: Matrix,
        hash_: str = "",
        models: Any = None,
        links: Any = None,
        **options: Any,
    ) -> None:
        self.file = folder / "matrix.html"
        self.file.write_text(rendered(matrix, models, links), encoding="utf-8")
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.tab: Page = browser.new_page(**{"viewport": LAPTOP, **options})
        self.tab.on("pageerror", lambda problem: self.wrong.append(str(problem)))
        self.tab.on("console", lambda message: self.wrong.append(message.text))
        self.tab.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self._load(hash_)

    def go(self, hash_: str) -> None:
        self.tab.goto("about:blank")
        self._load(hash_)

    def _load(self, hash_: str) -> None:
        self.tab.goto(f"{self.file.as_uri()}{hash_}")
        self.tab.wait_for_selector("#main:not([hidden])")

    @property
    def hash(self) -> str:
        return str(self.tab.evaluate("decodeURIComponent(location.hash)"))

    def wait_for_hash(self, wanted: str) -> None:
        """The browser closes a dialog first, and says so to the page afterwards."""
        self.tab.wait_for_function("wanted => location.hash === wanted", arg=wanted)

    def statuses(self) -> list[str]:
        return self.tab.locator("#cells .open .word").all_inner_texts()

    def title(self) -> str:
        return self.tab.locator("#cells-title").inner_text()


@contextlib.contextmanager
def pages(browser: Browser, folder: Path) -> Iterator[Any]:
    """Opens pages, and closes them if nothing went wrong in them and they asked for nothing else."""
    opened: list[Opened] = []

    def open_it(matrix: Matrix, hash_: str = "", **options: Any) -> Opened:
        opened.append(Opened(browser, folder, matrix, hash_, **options))
        return opened[-1]

    yield open_it
    for each in opened:
        each.tab.close()
        assert each.wrong == []
        assert {url.partition("#")[0] for url in each.requests} <= {"about:blank", each.file.as_uri()}


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Any]:
    with pages(browser, tmp_path) as open_it:
        yield open_it


@pytest.fixture(scope="module")
def open_page_once(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As `open_page`, for a page that several tests ask and leave as it is."""
    with pages(browser, tmp_path_factory.mktemp("page")) as open_it:
        yield open_it
