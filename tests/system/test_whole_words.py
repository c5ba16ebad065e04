"""Tables and paragraphs for a terminal: no width breaks a word, and narrow ones get blocks."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from attnplug._system.terminal_tables import Paragraph, SafeConsole, WrappedTable, verdict
from attnplug._system.text import shown as shown_value

WIDTHS = (20, 60, 69, 70, 80, 120)
WORD = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30)
# A table that fits no other way breaks names behind hyphens and commas.
WHOLE = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="-,"), min_size=1, max_size=30
)
CELL = st.lists(WHOLE, max_size=12).map(" ".join)


def shown(renderable: object, width: int, **settings: object) -> list[str]:
    file = io.StringIO()
    SafeConsole(file=file, width=width, markup=False, highlight=False, **settings).print(renderable)
    return file.getvalue().splitlines()


def made(rows: list[tuple[str, ...]], **settings: object) -> WrappedTable:
    table = WrappedTable(("name", "number", "why"), right=("number",), **settings)
    for row in rows:
        table.add_row(*row)
    return table


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WHOLE, CELL, CELL), min_size=1, max_size=4), st.sampled_from(WIDTHS))
def test_every_word_is_whole_and_no_line_is_wider_than_its_longest_word_needs(rows, width):
    lines = shown(made(rows), width)
    found = [word for line in lines for word in line.split()]
    for word in (word for row in rows for cell in row for word in cell.split()):
        assert word in found
        found.remove(word)
    for line in lines:
        assert line == line.rstrip()
        assert len(line) <= width or len(line.split()) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(WORD, min_size=1, max_size=40), st.sampled_from(WIDTHS))
def test_a_paragraph_has_all_its_words_in_order(words, width):
    lines = shown(Paragraph(" ".join(words)), width)
    assert " ".join(lines).split() == words
    assert all(len(line) <= width or " " not in line for line in lines)


ROWS = [
    ("TRITON", "228", "declared"),
    ("FLASHINFER", "230", "flashinfer-python not installed; pip install 'flashinfer-python>=0.5'"),
]


def test_a_wide_terminal_shows_one_line_for_each_row():
    assert shown(made(ROWS), 120) == [
        "name        number  why",
        "TRITON         228  declared",
        "FLASHINFER     230  flashinfer-python not installed; pip install 'flashinfer-python>=0.5'",
    ]


def test_a_cell_is_wrapped_between_words():
    assert shown(made(ROWS), 72)[2:] == [
        "FLASHINFER     230  flashinfer-python not installed; pip install",
        "                    'flashinfer-python>=0.5'",
    ]


def test_a_narrow_terminal_shows_a_block_for_each_row():
    assert shown(made(ROWS), 60) == [
        "TRITON",
        "  number  228",
        "  why     declared",
        "FLASHINFER",
        "  number  230",
        "  why     flashinfer-python not installed; pip install",
        "          'flashinfer-python>=0.5'",
    ]


def test_a_small_table_stays_a_table_on_a_narrow_terminal():
    assert shown(made(ROWS[:1]), 30) == ["name    number  why", "TRITON     228  declared"]


def test_a_long_word_is_below_its_label():
    word = "a" * 30
    assert shown(made([("x", "1", f"see {word}")]), 34)[2:] == ["  why", "    see", f"    {word}"]


def test_the_heading_of_a_block_may_name_columns():
    lines = shown(made(ROWS, heading="{name}: {number}"), 60)
    assert lines[:2] == ["TRITON: 228", "  why  declared"]


def test_names_and_values_need_no_blocks():
    table = WrappedTable(("", ""))
    table.add_row("features", "one two three four")
    table.add_row("class", "b" * 25)
    assert shown(table, 26) == ["features  one two three", "          four", "class", f"    {'b' * 25}"]


def test_a_row_without_cells_is_an_empty_line_of_a_table():
    table = made(ROWS[:1])
    table.add_row()
    table.add_row("TORCH", "0", "")
    assert shown(table, 80)[1:] == ["TRITON     228  declared", "", "TORCH        0"]
    assert table.row_count == 3


def test_wide_characters_count_as_two_cells():
    lines = shown(made([("注意力", "1", "x"), ("ab", "2", "y")]), 80)
    assert lines[1:] == ["注意力       1  x", "ab           2  y"]


def test_text_cannot_control_the_terminal_nor_misalign_a_column():
    lines = shown(made([("\x1b[31mred", "1", "a\tb"), ("x", "2", "y")]), 80)
    assert lines[1] == "\\x1b[31mred       1  a b"
    assert lines[2].index("2") == lines[1].index(" 1 ") + 1


@pytest.mark.parametrize(("word", "colour"), [("chosen", "32"), ("refused", "31"), ("warning", "33")])
def test_verdicts_have_colours(word, colour):
    (line,) = shown(verdict(word), 80, force_terminal=True, color_system="standard")
    assert f"{colour}m{word}" in line
    assert shown(verdict(word), 80) == [word]


def test_the_style_of_a_cell_survives_wrapping():
    table = WrappedTable(("", ""))
    table.add_row("a", Text("one two three", "green"))
    lines = shown(table, 12, force_terminal=True, color_system="standard")
    assert [line.count("\x1b[32m") for line in lines] == [1, 1]


def test_blocks_of_one_unnamed_column_and_a_heading_have_a_line_for_each_row():
    table = WrappedTable(("name", "", ""))
    table.add_row("one", "first", "a second text that is long")
    table.add_row("two", "", "x" * 30)
    assert shown(table, 30) == [
        "name",
        "one",
        "  first  a second text that is",
        "  long",
        "two",
        f"    {'x' * 30}",
    ]


def test_a_table_in_another_one_has_the_width_of_its_columns():
    console = SafeConsole(file=io.StringIO(), width=80)
    # Headings and cells of 6, 6 and 8 characters, with two blanks between them; the longest column is the least.
    assert console.measure(made(ROWS[:1])) == (8, 6 + 6 + 8 + 2 * 2)


def test_a_terminal_without_a_width_has_eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    file = io.StringIO()
    console = SafeConsole(file=file, legacy_windows=False)
    assert console.width == 80
    console.print(" ".join(["word"] * 20))
    assert file.getvalue().splitlines() == [" ".join(["word"] * 16), " ".join(["word"] * 4)]


def test_text_with_markup_is_escaped_before_it_is_measured():
    console = SafeConsole(file=io.StringIO(), width=80)
    rendered = console.render_str("[bold]a\x1b[/bold]")
    assert (rendered.plain, rendered.cell_len) == (r"a\x1b", 5)


def test_an_interrupt_while_a_value_is_shown_is_not_swallowed():
    class Interrupts:
        def __repr__(self) -> str:
            raise KeyboardInterrupt

    class Raises:
        def __repr__(self) -> str:
            raise SystemExit

    with pytest.raises(KeyboardInterrupt):
        shown_value(Interrupts())
    assert shown_value(Raises()) == "<Raises without a repr: SystemExit>"
    assert shown_value("a" * 50, 20) == f"'{'a' * 16}..."


@pytest.mark.parametrize("package", ["acme", "acme-kernels", "acme-kernels-of-a-long-name"])
def test_a_longer_name_of_a_plugin_costs_lines_and_not_the_table(package):
    table = WrappedTable(("backend", "priority", "from", "devices", "needs"), ("priority",), ("backend",))
    table.add_row("FLASHINFER", "230", "attnplug 0.1.0", "cuda", "flashinfer-python>=0.5,<0.8 (missing)")
    table.add_row("FLASH_ATTN_4", "225", f"attnplug-{package} 0.1.0", "cuda, rocm, mps", "nothing")
    lines = shown(table, 80)
    assert lines[0].split() == ["backend", "priority", "from", "devices", "needs"]
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 8
    assert any("flashinfer-python>=0.5,<0.8" in line for line in lines), (
        "names are broken before requirements"
    )
