"""The help of the commands: options in groups, whole words, and no frame, at any width."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from attnplug._system.terminal_tables import wrapped

_INDENT, _GAP = 2, 2
# A longer label has its text below it, because it would move the texts of all others to the right.
_MOST_LABEL = 30


class _Helpful:
    """The help of a command or a group, in place of typer's."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """The paragraphs of the help."""
        for text in _paragraphs(self):
            formatter.write("\n" + _lines(text, _INDENT, formatter.width))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The arguments and options, by their panels."""
        sections: dict[str, list[tuple[str, str]]] = {}
        command: Any = self
        for param in command.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                default = "Arguments" if is_argument else "Options"
                # The text of an argument says what it is; its Python type says nothing more.
                record = (record[0].partition(" <")[0], record[1]) if is_argument else record
                panel = getattr(param, "rich_help_panel", None) or default
                sections.setdefault(panel, []).append(record)
        # --help and its like come last, as they are the same everywhere.
        for title in sorted(sections, key=lambda each: (each == "Options", each != "Arguments")):
            _write_section(formatter, title, sections[title])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The example."""
        command: Any = self
        for text in (command.epilog or "").split("\n"):
            formatter.write("\n" + _lines(text, 0, formatter.width) if text else "")


class HelpfulCommand(_Helpful, TyperCommand):
    """A command whose help has its options by their panels."""


class HelpfulGroup(_Helpful, TyperGroup):
    """A group of commands with such a help; it names each command with its first sentence."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The options, then the commands."""
        super().format_options(ctx, formatter)
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _paragraphs(each)[0]) for name, each in found if each is not None and not each.hidden]
        _write_section(formatter, "Commands", rows)


def _write_section(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    # A bracket is escaped for rich, which does not print it here.
    plain = [(label, text.replace("\\[", "[")) for label, text in rows]
    short = [len(label) for label, _ in plain if len(label) <= _MOST_LABEL]
    column = _INDENT + max(short, default=0) + _GAP
    formatter.write(f"\n{title}:\n")
    for label, text in plain:
        beside = len(label) <= _MOST_LABEL
        lines = _lines(text, column, formatter.width)
        start = " " * _INDENT + label
        formatter.write(start.ljust(column) + lines[column:] if beside and text else f"{start}\n{lines}")


def _lines(text: str, indent: int, width: int) -> str:
    return "".join(f"{' ' * indent}{line.plain}\n" for line in wrapped(Text(text), width - indent))


def _paragraphs(command: Any) -> list[str]:
    texts = (" ".join(part.split()) for part in (command.help or "").partition("\f")[0].split("\n\n"))
    return [text.replace("\\[", "[") for text in texts if text] or [""]
