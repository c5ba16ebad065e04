"""The hooks of the site: help as the program prints it, and no address that a browser fetches by itself."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import typer.main
from fences import DOCS
from scripts import load_script

from attnplug.cli.app import app
from attnplug.core.interface.ported_names import BACKEND_NAMES, BUILDER_NAMES, IMPL_NAMES, PORTED_PARAMETERS
from attnplug.core.reasons import REASON_HELP


def hook(name: str) -> ModuleType:
    return load_script(DOCS / "hooks" / f"{name}.py")


@pytest.mark.slow
def test_the_page_of_commands_has_a_section_for_each_with_its_options() -> None:
    # One test, as the page is made by as many runs of attnplug as it has commands.
    page = hook("cli_help").on_page_markdown((DOCS / "reference/cli.md").read_text())
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands) > 4
    for name, command in commands.items():
        assert f"[`attnplug {name}`](#attnplug-{name})" in page
        section = page.partition(f"\n## attnplug {name}\n")[2].partition("\n## ")[0]
        assert f"Usage: attnplug {name} " in section
        for parameter in command.params:
            shown = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar]
            assert any(each in section for each in shown), f"{name} {parameter.name}"
    # Commands of a command have sections of their own.
    assert "| [`attnplug matrix merge`](#attnplug-matrix-merge) | Join the results" in page
    section = page.partition("\n## attnplug matrix diff\n")[2].partition("\n## ")[0]
    assert "Usage: attnplug matrix diff " in section


def test_a_page_without_the_marker_is_left_alone() -> None:
    assert hook("cli_help").on_page_markdown("# Title\n") == "# Title\n"


def test_help_that_fails_stops_the_build() -> None:
    with pytest.raises(RuntimeError, match="attnplug nonsense --help ended with 2"):
        hook("cli_help").help_of("nonsense")


def test_the_page_of_porting_has_every_refused_name_with_what_to_write() -> None:
    page = hook("core_tables").on_page_markdown((DOCS / "guides/port-from-vllm.md").read_text())
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for names in (BACKEND_NAMES, IMPL_NAMES, BUILDER_NAMES):
        for name, ported in names.items():
            assert any(f"`{name}`" in row and row.endswith(f"| {ported.write} |") for row in rows), name
    for name, write in PORTED_PARAMETERS.items():
        assert f"| `{name}` | {write} |" in rows


def test_the_page_of_troubleshooting_has_every_reason_code_with_what_to_do() -> None:
    page = hook("core_tables").on_page_markdown((DOCS / "guides/troubleshooting.md").read_text())
    for code, help_ in REASON_HELP.items():
        section = page.partition(f" {{ #{code} }}\n")[2].partition("\n### ")[0]
        assert all(text in section for text in (help_.seen, help_.why, *help_.steps)), code


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="preconnect" href="https://example.org">',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<img src="HTTP://example.org/a.png">',
    ],
)
def test_what_a_browser_would_fetch_is_warned_of(html: str, caplog: pytest.LogCaptureFixture) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_path="index.md"))
    with caplog.at_level(logging.WARNING):
        assert hook("no_network").on_post_page(html, page=page) == html
    assert "index.md fetches" in caplog.text


@pytest.mark.parametrize(
    "html",
    [
        '<a href="https://example.org">a link to follow</a>',
        '<script src="assets/a.js"></script>',
        '<link rel="canonical" href="https://example.org">',
    ],
)
def test_what_a_reader_follows_is_no_fetch(html: str) -> None:
    assert hook("no_network").loads(html) == []


def test_style_sheets_and_the_page_for_lost_readers_are_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "404.html").write_text('<script src="https://example.org/a.js"></script>')
    (tmp_path / "own.css").write_text('@import "https://example.org/a.css"; a { b: url(own.png) }')
    with caplog.at_level(logging.WARNING):
        hook("no_network").on_post_build(config={"site_dir": str(tmp_path), "extra_css": ["own.css"]})
    assert [record.getMessage() for record in caplog.records] == [
        "404.html fetches https://example.org/a.js when it is read",
        "own.css fetches https://example.org/a.css when a page is read",
    ]
