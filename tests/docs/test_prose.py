"""Pages, help texts and docstrings of the reference have short sentences, in plain words, that name the actor first."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

import click
import pytest
import typer.main
from fences import DOCS, PAGES, ROOT
from prose import MOST_WORDS, habits, paragraphs, sentences

from attnplug.cli.app import app

PROMISE = "What a layer asks for is honoured or refused with a reason, never ignored"
"""The promise keeps its words, wherever it is."""

OTHERS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "attnplug" / "templates").rglob("*.md.tmpl")),
    *sorted((ROOT / "ci").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
TEXTS = {path.relative_to(ROOT).as_posix(): path for path in [*(DOCS / page for page in PAGES), *OTHERS]}


def faults(markdown: str) -> list[str]:
    """The sentences with a known bad habit, each with the habit."""
    return [
        f"{', '.join(found)}: {sentence}"
        for paragraph in paragraphs(markdown)
        for sentence in sentences(paragraph)
        if not sentence.startswith(PROMISE) and (found := habits(sentence))
    ]


@pytest.mark.parametrize("name", TEXTS)
def test_a_page_has_short_sentences_in_plain_words(name: str) -> None:
    assert faults(TEXTS[name].read_text(encoding="utf-8")) == []


def help_texts(command: click.Command, name: str) -> list[tuple[str, str]]:
    """What `--help` prints of a command, its options and its own commands."""
    found = [(name, inspect.cleandoc(text)) for text in (command.help, command.epilog) if text]
    found += [(f"{name} {each.name}", each.help) for each in command.params if getattr(each, "help", None)]
    for sub_name, sub in getattr(command, "commands", {}).items():
        found += help_texts(sub, f"{name} {sub_name}")
    return found


def test_help_texts_have_short_sentences_in_plain_words() -> None:
    texts = help_texts(typer.main.get_command(app), "attnplug")
    assert len(texts) > 60
    assert [(name, fault) for name, text in texts for fault in faults(text)] == []


def docstrings(name: str) -> Iterator[tuple[str, str]]:
    """The docstrings that the reference shows under a name: its own, and those of its public members."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    members = {name: value}
    if inspect.isclass(value):
        members |= {f"{name}.{key}": each for key, each in vars(value).items() if not key.startswith("_")}
    for key, each in members.items():
        function = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
        # A value that is neither has the docstring of its type, which is not shown.
        if (inspect.isclass(function) or inspect.isfunction(function)) and function.__doc__:
            yield key, in_markdown(inspect.cleandoc(function.__doc__))


def in_markdown(docstring: str) -> str:
    """A docstring whose arguments and errors are items, and whose examples are code."""
    text = re.sub(r"^>>>.*?(?=\n\n|\Z)", "", docstring, flags=re.M | re.S)
    text = re.sub(r"^(?:Args|Attributes|Raises|Returns|Yields):$", "", text, flags=re.M)
    return re.sub(r"^    [\w.*]+: ", "* ", text, flags=re.M)


def test_docstrings_of_the_reference_have_short_sentences_in_plain_words() -> None:
    names = [
        name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", (DOCS / page).read_text(), re.M)
    ]
    texts = [pair for name in names for pair in docstrings(name)]
    assert len(texts) > len(names) > 100
    assert [(name, fault) for name, text in texts for fault in faults(text)] == []


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        ("one " * (MOST_WORDS + 1) + "end.", f"{MOST_WORDS + 2} words"),
        ("It works.\n\nWhat it reads\nis a file.", "begins with 'What'"),
        ("* Kernels stand behind two\n  doors.", "'stand behind'"),
        ("| a | It is asked [for](page.md). |", "'is asked'"),
        ("## Who serves it", "begins with 'Who'"),
    ],
)
def test_a_bad_habit_is_found(text: str, habit: str) -> None:
    (fault,) = faults(text)
    assert habit in fault


@pytest.mark.parametrize(
    "text",
    [
        "```text\nWhat stands here is code.\n```",
        "<!-- What stands here is a comment. -->",
        "`whoever` is a name.",
        "What does it cost?",
        f"**{PROMISE}.**",
        ("one " * MOST_WORDS).strip() + ".\n" + ("two " * MOST_WORDS).strip() + ".",
        "* " + "one " * MOST_WORDS + "\n* " + "two " * MOST_WORDS,
    ],
)
def test_code_questions_and_separate_items_are_no_fault(text: str) -> None:
    assert faults(text) == []
