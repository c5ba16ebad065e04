"""The hooks of the site: help as the program prints it, and no address that a browser fetches by itself."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import typer.main
from fences import DOCS, ROOT
from scripts import load_script

from attnplug.cli.app import app
from attnplug.core import Feature
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
        section = page.partition(f" {{ #{code} data-toc-label=")[2].partition("\n### ")[0]
        assert all(text in section for text in (help_.seen, help_.why, *help_.steps)), code


def test_a_title_of_each_reason_has_the_sentence_that_readers_search_for() -> None:
    # The search looks in titles first; the page ranks before others that quote a refusal.
    page = hook("core_tables").on_page_markdown((DOCS / "guides/troubleshooting.md").read_text())
    assert re.match(r"---\nsearch:\n  boost: [2-9]\n---\n", page)
    titles = {code: title for title, code in re.findall(r"^### (.*) \{ #(\w+) ", page, re.MULTILINE)}
    assert titles["sink"] == "sinks not supported"
    assert titles["mla"] == "mla: MLA not supported"
    assert titles["head_size"] == "head_size not supported"
    for code, help_ in REASON_HELP.items():
        sentence = titles[code].rpartition(": ")[2]
        assert sentence == code if help_.seen.startswith("(") else help_.seen.startswith(sentence)
    refused = {
        feature.ask.refusal or f"{feature.names()[0]} not supported"
        for feature in Feature
        if not feature.ask.code
    }
    assert all(f"`{sentence}`" in page for sentence in refused)


def test_the_page_of_plugins_has_the_examples_with_the_backends_that_they_offer() -> None:
    script = hook("core_tables")
    page = script.on_page_markdown((DOCS / "reference/known-plugins.md").read_text())
    known = tomllib.loads(script.KNOWN_PLUGINS.read_text())
    assert {path.name for path in (ROOT / "examples/plugins").iterdir() if path.is_dir()} <= set(known)
    for name, plugin in known.items():
        assert name.startswith("attnplug-")
        assert f"`{name}`" in page
        if not plugin["at"].startswith("https://"):
            folder = ROOT / plugin["at"]
            assert tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"] == name
            source = "".join(path.read_text() for path in folder.rglob("*.py"))
            assert all(f'return "{backend}"' in source for backend in plugin["backends"])


def highlighted(text: str) -> str:
    """A block as the site shows it: the prompt, and each other line, in a span of its own."""
    lines = [
        re.sub(r"^(\$|(?:&gt;){3}|\.\.\.)( |$)", r'<span class="gp">\1\2</span>', line)
        for line in text.splitlines()
    ]
    return f'<div class="highlight"><pre><span></span><code>{chr(10).join(lines)}\n</code></pre></div>'


@pytest.mark.parametrize(
    ("shown", "copied"),
    [
        ("$ attnplug list\nbackend  priority\n\nTORCH  0\n$ ls", "attnplug list&#10;ls"),
        (
            "$ attnplug select a.json \\\n    --memory 40GiB\nlayers",
            "attnplug select a.json \\&#10;    --memory 40GiB",
        ),
        ("$ attnplug matrix --only &#x27;a&lt;b&#x27;", "attnplug matrix --only &#x27;a&lt;b&#x27;"),
        (
            "&gt;&gt;&gt; def f():\n...     return 1\n...\n&gt;&gt;&gt; f()\n1",
            "def f():&#10;    return 1&#10;&#10;f()",
        ),
    ],
)
def test_the_copy_button_takes_commands_without_prompts_and_output(shown: str, copied: str) -> None:
    block = highlighted(shown)
    (found,) = re.findall(
        r'<div class="highlight" data-copy="([^"]*)"><pre>', hook("copy_button").on_page_content(block)
    )
    assert found == copied


def test_the_copy_button_takes_other_blocks_whole() -> None:
    block = highlighted("import attnplug\n\n# costs $ 5")
    assert hook("copy_button").on_page_content(block) == block


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="preconnect" href="https://example.org">',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<img src="HTTP://example.org/a.png">',
        '<pre class="mermaid"><code>graph TD</code></pre>',
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
