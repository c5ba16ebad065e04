"""The layers of a model as a strip of cells."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from attnplug.cli.output.run_report import waiting
from attnplug.cli.output.select_report import LayerStrip
from attnplug.matrix.words import letters

MODELS = Path(__file__).parents[2] / "examples" / "models"
NAMES = ("TORCH", "TRITON", "FLASHINFER", "FLASH_ATTN_2", "FLASH_ATTN_3", "FLASH_ATTN_4")


def shown(rows: dict[str, list[str]], width: int, *, colour: bool = False) -> str:
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=colour, color_system="standard" if colour else None).print(
        LayerStrip(rows, NAMES)
    )
    return text.getvalue()


def test_each_backend_has_a_letter_of_its_own():
    found = letters((*NAMES, "none"))
    expected = {"FLASHINFER": "F", "TORCH": "T", "TRITON": "R", "none": "-"}
    assert found.items() >= expected.items()
    assert [found[f"FLASH_ATTN_{n}"] for n in (2, 3, 4)] == ["2", "3", "4"]
    assert len(set(found.values())) == len(found)
    many = letters(f"T{'O' * n}" for n in range(60))
    assert len(set(many.values())) == len(many)


def test_one_cell_a_layer_and_a_legend():
    text = shown({"": ["TORCH", "TRITON"] * 6 + ["none"]}, 80)
    assert text == " 0  TRTRTRTRTR TR-\nT = TORCH, R = TRITON, - = none\n"


@pytest.mark.parametrize("width", [12, 30, 60, 80, 120])
def test_it_wraps_at_the_width_and_loses_no_layer(width):
    lines = shown({"": ["TRITON"] * 95}, width).splitlines()
    cells = [line for line in lines if "=" not in line]
    assert sum(line.count("R") for line in cells) == 95
    assert all(len(line) <= width for line in cells)
    assert [int(line.split()[0]) for line in cells] == [
        sum(line.count("R") for line in cells[:index]) for index in range(len(cells))
    ]


def test_each_phase_has_a_row_where_the_phases_differ():
    lines = shown({"prefill": ["FLASH_ATTN_4"] * 3, "decode": ["TRITON"] * 3}, 80).splitlines()
    assert lines == ["prefill  0  444", "decode   0  RRR", "4 = FLASH_ATTN_4, R = TRITON"]


def test_a_terminal_with_colours_gets_them_and_the_same_letters():
    rows = {"": ["TORCH", "TRITON"]}
    assert "\x1b[33mR" in shown(rows, 80, colour=True)
    assert "\x1b" not in shown(rows, 80)


def test_select_draws_the_strip(run):
    outcome = run("select", MODELS / "gemma-3-27b-text.json", "--device", "cpu")
    assert " 0  TTTTTTTTTT" in outcome.out
    assert "T = TORCH" in outcome.out
    rules = ("--backend", "TRITON,sliding=TORCH", "--device", "h100", "--assume-installed", "all")
    assert " 0  TTTTTRTTTT TR" in run("select", MODELS / "gemma-3-27b-text.json", *rules).out


def test_a_spinner_shows_its_words_on_a_terminal_only():
    for is_terminal in (True, False):
        text = io.StringIO()
        console = Console(file=text, width=80, force_terminal=is_terminal)
        with waiting("Reading the model", after=0, console=console):
            while is_terminal and "Reading" not in text.getvalue():
                pass
        assert ("Reading the model" in text.getvalue()) is is_terminal


def test_a_quick_step_shows_no_spinner():
    text = io.StringIO()
    with waiting("Reading the model", after=60, console=Console(file=text, width=80, force_terminal=True)):
        pass
    assert "Reading" not in text.getvalue()
