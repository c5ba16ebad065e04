"""The page in a browser: filtered by a feature, a cell opened, by mouse and keyboard, on a laptop and a phone."""

from __future__ import annotations

import re
import time
from random import Random
from typing import Any

import pytest
from synthetic_matrix import HOSTILE, hostile_matrix, joined_matrix, synthetic_matrix

from attnplug.backends.flash_attn.backend import FlashAttn4Backend
from attnplug.backends.flashinfer.backend import FlashInferBackend
from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.backends.triton.backend import TritonBackend
from attnplug.core.device import Device
from attnplug.matrix import Cell, Matrix, Status
from attnplug.matrix.axes import axes_of, goes_with, own_latents
from attnplug.matrix.design import cell_reasons, declare
from attnplug.matrix.summary import summarise
from attnplug.matrix.words import AXIS_NAMES, value_in_words

LAPTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def cells_of(matrix: Matrix, **values: object) -> list[Status]:
    return [
        found.status
        for run in matrix.runs
        for found in run.findings
        if all(getattr(found.cell, axis) == value for axis, value in values.items())
    ]


@pytest.mark.parametrize("viewport", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_filtering_by_a_feature_and_opening_a_cell_shows_its_evidence(open_page: Any, viewport: Any) -> None:
    matrix = synthetic_matrix()
    page = open_page(matrix, viewport=viewport)
    if viewport is PHONE:
        page.tab.locator("#more summary").click()
    page.tab.get_by_role("combobox", name="feature").select_option("alibi")
    assert page.title() == f"{len(cells_of(matrix, feature='alibi'))} cells"
    assert page.statuses()[0] == "refuted"
    page.tab.locator("#cells .open").first.click()
    dialog = page.tab.get_by_role("dialog", name="ALiBi")
    text = dialog.inner_text()
    assert "37 of 2048 elements are off by more than 0.01" in text
    assert "these are the numbers of a layer without ALiBi" in text
    assert "NVIDIA H200" in text
    assert "torch 2.11.0" in text
    assert "2026-11-21 18:00 UTC" in text
    assert "attnplug matrix --verify --backend FLASHINFER --feature alibi" in text
    page.tab.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    page.wait_for_hash("#feature=alibi")


@pytest.mark.parametrize("axis", AXIS_NAMES)
@pytest.mark.parametrize("make", [synthetic_matrix, joined_matrix])
def test_the_overview_says_what_the_other_renderers_say(open_page: Any, axis: str, make: Any) -> None:
    matrix = make()
    page = open_page(matrix, f"#by={axis}")
    expected = {
        (value_in_words(axis, value), f"{each.backend} on {each.device}", str(answer.status)): answer
        for each in matrix.runs
        for value, answer in summarise(each).answers[axis].items()
    }
    shown = page.tab.locator("#overview .answer").evaluate_all(
        "all => all.map((each) => each.ariaLabel.split(', '))"
    )
    assert {tuple(words[:3]) for words in shown} == set(expected)
    for words in shown:
        answer = expected[tuple(words[:3])]
        rest = [answer.ran.replace("/", " of ")] if answer.ran else []
        if answer.restriction:
            rest.append(str(answer.restriction))
        if answer.elsewhere:
            rest.append(answer.elsewhere)
        if answer.limits:
            rest.append(f"not with {len(answer.limits)} other value{'s' if len(answer.limits) > 1 else ''}")
        assert words[3:] == rest


def test_an_answer_of_the_overview_opens_its_reasons_and_lists_its_cells(open_page: Any) -> None:
    matrix = synthetic_matrix()
    page = open_page(matrix)
    page.tab.get_by_role("button", name="ALiBi, TRITON on sm90, sampled").click()
    dialog = page.tab.get_by_role("dialog", name="ALiBi")
    assert "head size 256: combination not supported: alibi with 256" in dialog.inner_text()
    number = sum(len(cells_of(Matrix((run,)), feature="alibi")) for run in matrix.runs[2:3])
    dialog.get_by_role("button", name=f"List {number} cells").click()
    assert page.hash == "#backend=TRITON&device=sm90&feature=alibi"
    assert page.title() == f"{number} cells"
    assert page.tab.evaluate("document.activeElement.id") == "cells-title"


def test_an_answer_and_a_cell_of_another_run_have_its_card_versions_and_date(open_page: Any) -> None:
    page = open_page(joined_matrix())
    heads = page.tab.locator("#overview th[scope=col]").all_inner_texts()
    assert heads == ["TRITON\nNVIDIA H100", "ACME\nattnplug-acme, NVIDIA H200"]
    page.tab.get_by_role("button", name="sinks, TRITON on sm90, sampled, 1 cell, on NVIDIA H200").click()
    text = page.tab.get_by_role("dialog", name="sinks").inner_text()
    assert "sm90, NVIDIA H200" in text
    assert "2026-11-28 04:46 UTC" in text
    assert "NVIDIA H100" not in text
    page.go("#show=answer|TRITON|sm90|feature|plain")
    text = page.tab.get_by_role("dialog", name="plain").inner_text()
    assert "sm90, NVIDIA H100" in text
    assert "1 cell: NVIDIA H200, python 3.12.3, torch 2.11.0, triton 3.6.0, 2026-11-28 04:46 UTC" in text
    page.go("#show=cell|TRITON|sm90|alibi/prefill/d128/float16/auto/b16/NHD")
    text = page.tab.get_by_role("dialog", name="ALiBi").inner_text()
    assert "triton 3.7.1" in text
    assert "NVIDIA" not in text
    page.go("#text=h200")
    assert page.title() == "3 cells"
    page.tab.get_by_text("Where it comes from").click()
    words = "TRITON on sm90, another run with 2 cells: attnplug 0.1.0, NVIDIA H200, python 3.12.3"
    assert words in page.tab.locator("#runs").inner_text()


def test_the_browsers_back_button_closes_what_was_opened(open_page: Any) -> None:
    page = open_page(synthetic_matrix(), "#feature=sinks")
    page.tab.locator("#cells .open").first.click()
    page.tab.get_by_role("dialog").wait_for()
    page.tab.go_back()
    page.tab.get_by_role("dialog").wait_for(state="hidden")
    page.wait_for_hash("#feature=sinks")


def test_the_address_alone_shows_the_same_again(open_page: Any) -> None:
    page = open_page(
        synthetic_matrix(), "#device=sm90&layout=HND&status=refused,not-run&text=float32+dtype&by=dtype"
    )
    assert set(page.statuses()) == {"refused"}
    chips = page.tab.locator("#chips button").evaluate_all("all => all.map((each) => each.ariaLabel)")
    assert chips == [
        "Remove the filter device sm90 (NVIDIA H200)",
        "Remove the filter layout HND",
        "Remove the filter status refused",
        "Remove the filter status not run",
        "Remove the filter text float32 dtype",
        None,
    ]
    assert page.tab.locator("#by input:checked").input_value() == "dtype"
    page.tab.get_by_role("button", name="Clear all").click()
    assert page.title() == "All 2,955 cells"
    assert page.hash == "#by=dtype"


def test_an_address_that_means_nothing_shows_everything(open_page: Any) -> None:
    page = open_page(synthetic_matrix(), "#feature=nothing&status=maybe&by=colour&show=cell|TORCH|cpu|x&junk")
    assert page.title() == "All 2,955 cells"
    assert page.tab.get_by_role("dialog").count() == 0


@pytest.mark.parametrize("hash_", ["#show=answer|TORCH|cpu|colour|red", "#show=run|ACME|cpu", "#show=junk"])
def test_nothing_opens_for_a_name_that_is_not_there(open_page: Any, hash_: str) -> None:
    assert open_page(synthetic_matrix(), hash_).tab.get_by_role("dialog").count() == 0


def test_a_status_is_a_button_that_can_be_pressed(open_page: Any) -> None:
    page = open_page(synthetic_matrix())
    refuted = page.tab.locator("#statuses").get_by_role("button", name="refuted 1")
    refuted.press("Enter")
    assert refuted.get_attribute("aria-pressed") == "true"
    assert page.statuses() == ["refuted"]
    assert page.tab.get_by_role("status").inner_text() == "1 cell shown"
    refuted.press("Space")
    assert page.title() == "All 2,955 cells"


def test_a_search_finds_words_of_a_reason(open_page: Any) -> None:
    page = open_page(synthetic_matrix())
    page.tab.get_by_label("text", exact=True).fill("Elements  OFF by")
    page.tab.get_by_text("1 cell shown").wait_for(state="attached")
    assert page.statuses() == ["refuted"]
    page.tab.get_by_label("text", exact=True).fill("no such words")
    page.tab.get_by_text("No cell passes all of these filters.").wait_for()
    assert page.hash == "#text=no+such+words"


def test_more_cells_are_shown_when_asked_for(open_page: Any) -> None:
    page = open_page(synthetic_matrix())
    assert len(page.statuses()) == 100
    page.tab.get_by_role("button", name="Show 100 more of 2,855").press("Enter")
    assert len(page.statuses()) == 200
    assert page.tab.evaluate("document.activeElement === document.querySelectorAll('#cells .open')[100]")


def test_the_keyboard_alone_reaches_a_cell_and_comes_back(open_page: Any) -> None:
    page = open_page(synthetic_matrix(), "#feature=sinks&backend=TORCH")
    page.tab.locator("#cells .open").first.focus()
    page.tab.keyboard.press("Enter")
    dialog = page.tab.get_by_role("dialog", name="sinks")
    dialog.wait_for()
    assert page.tab.evaluate("document.activeElement.id") == "detail-title"
    page.tab.keyboard.press("Tab")
    page.tab.keyboard.press("Enter")
    dialog.wait_for(state="hidden")
    assert page.tab.evaluate("document.activeElement.className") == "open"


def test_a_screen_reader_meets_tables_with_heads_on_a_phone_too(open_page: Any) -> None:
    page = open_page(synthetic_matrix(), "#feature=sinks", viewport=PHONE)
    cells = page.tab.get_by_role("table", name="cells")
    assert cells.get_by_role("columnheader").count() == 11
    assert cells.get_by_role("row").nth(1).get_by_role("cell").count() >= 9
    overview = page.tab.locator("#overview")
    assert overview.get_by_role("rowheader").count() == 1
    assert overview.get_by_role("columnheader", name="TRITON").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1280])
def test_nothing_is_wider_than_the_screen(open_page: Any, width: int, scheme: str) -> None:
    page = open_page(synthetic_matrix(), viewport={"width": width, "height": 844}, color_scheme=scheme)
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    page.tab.locator("#cells .open").first.click()
    assert page.tab.locator("#detail").evaluate("each => each.scrollWidth <= each.clientWidth")


def test_texts_of_a_plugin_are_shown_and_never_run(open_page: Any) -> None:
    page = open_page(hostile_matrix())
    page.tab.locator("#cells .open").first.click()
    dialog = page.tab.get_by_role("dialog")
    assert HOSTILE.split("|")[0].strip() in dialog.inner_text()
    assert page.tab.locator("img").count() == 0
    assert "run again" not in dialog.inner_text()


def test_ten_thousand_cells_are_filtered_in_one_page(open_page: Any) -> None:
    matrix = synthetic_matrix(10_000)
    page = open_page(matrix)
    page.tab.get_by_role("combobox", name="feature").select_option("sinks")
    assert page.title() == f"{len(cells_of(matrix, feature='sinks')):,} cells"


def test_an_empty_matrix_says_so(open_page: Any) -> None:
    page = open_page(Matrix(()))
    assert page.tab.get_by_text("The matrix is empty.").is_visible()


@pytest.mark.parametrize("by", ["mouse", "keyboard"])
def test_three_choices_lead_from_opening_the_page_to_the_answer(
    open_page: Any, models_data: Any, by: str, record_property: Any
) -> None:
    started = time.perf_counter()
    page = open_page(Matrix(()), models=models_data)
    choices = {"Model": "gpt-oss-20b", "GPU": "A100 (sm80)", "KV cache dtype": "fp8 (any)"}
    for label, wanted in choices.items():
        box = page.tab.get_by_role("combobox", name=label)
        if by == "mouse":
            box.select_option(wanted)
        else:
            box.focus()
            # Typing selects in a closed list, as in all programs.
            page.tab.keyboard.type(wanted)
    assert page.tab.get_by_role("status").first.inner_text() == (
        "On an A100 with an fp8 cache, gpt-oss-20b runs on TRITON with e5m2; "
        "e4m3 is refused: fp8_e4m3 needs compute capability 8.9."
    )
    # A figure for the report, and no bound: how fast a machine is says nothing of the page.
    record_property("seconds_to_the_answer", round(time.perf_counter() - started, 2))
    assert page.hash == "#model=gpt-oss-20b&gpu=a100&kv=fp8"
    command = page.tab.locator("#command").inner_text()
    assert command.startswith(
        "attnplug select examples/models/gpt-oss-20b.json --device a100 --kv-cache-dtype fp8_e5m2"
    )
    strip = page.tab.get_by_role("img", name="24 layers")
    assert strip.inner_text().split() == ["R"] * 24


@pytest.mark.parametrize("gpu", ["h100", "H100", "sm90"])
def test_an_address_opens_the_answer_for_a_model(open_page: Any, models_data: Any, gpu: str) -> None:
    page = open_page(synthetic_matrix(), f"#model=deepseek-v3&gpu={gpu}&kv=auto", models=models_data)
    sentence = page.tab.locator("#sentence").inner_text()
    assert (
        sentence
        == "On an H100 with a bfloat16 cache, deepseek-v3 runs on FLASH_ATTN_4 in prefill and FLASH_MLA in decode."
    )
    assert page.tab.get_by_role("img").count() == 2
    assert page.tab.locator("#overview").is_hidden()
    page.tab.get_by_role("link", name="Compatibility matrix").click()
    assert page.tab.locator("#overview").is_visible()
    page.tab.get_by_role("link", name="Which backend for my model?").click()
    assert page.tab.get_by_role("heading", name="Which backend for my model?").is_visible()


def test_an_address_that_names_no_model_shows_the_first_answer(open_page: Any, models_data: Any) -> None:
    page = open_page(Matrix(()), "#model=no-such&gpu=rtx9999&kv=fp9", models=models_data)
    assert (
        page.tab.locator("#sentence")
        .inner_text()
        .startswith("On an H100 with a bfloat16 cache, gpt-oss-20b runs on")
    )


def test_the_candidates_have_their_reasons_and_the_command_can_be_copied(
    open_page: Any, models_data: Any
) -> None:
    page = open_page(Matrix(()), "#model=gpt-oss-20b&gpu=a100&kv=fp8_e4m3", models=models_data)
    page.tab.get_by_text("All candidates with their reasons").click()
    row = page.tab.get_by_role("row").filter(has=page.tab.get_by_role("rowheader", name="TRITON")).first
    assert "refused" in row.inner_text()
    assert "fp8_e4m3 needs compute capability 8.9; fp8_e5m2 does not" in row.inner_text()
    page.tab.get_by_role("button", name="Copy").click()
    # The page's policy forbids a waiting script: the answer, "Copied" or how to copy by hand, is waited for by its text.
    page.tab.locator("#copied").filter(has_text=re.compile(r"\S")).wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_no_answer_is_wider_than_the_screen(
    open_page: Any, models_data: Any, width: int, scheme: str
) -> None:
    viewport = {"width": width, "height": 844}
    page = open_page(Matrix(()), models=models_data, viewport=viewport, color_scheme=scheme)
    page.tab.get_by_text("All candidates with their reasons").click()
    for model in ("whisper-large-v3", "deepseek-v3", "llama-3.1-70b"):
        page.tab.get_by_role("combobox", name="Model").select_option(model)
        page.tab.get_by_role("combobox", name="GPU").select_option("A100 (sm80)")
        page.tab.get_by_role("combobox", name="KV cache dtype").select_option("fp8_e4m3")
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_has_a_way_back_to_the_site(open_page: Any, models_data: Any) -> None:
    links = {"attnplug documentation": "../index.html"}
    for matrix, more in ((synthetic_matrix(), None), (Matrix(()), models_data)):
        page = open_page(matrix, models=more, links=links)
        assert (
            page.tab.get_by_role("link", name="attnplug documentation").get_attribute("href")
            == "../index.html"
        )


def test_the_arrow_keys_move_in_the_overview_which_is_one_stop(open_page: Any) -> None:
    page = open_page(synthetic_matrix())
    answers = page.tab.locator("#overview .answer")
    assert answers.count() > 60
    assert page.tab.locator("#overview .answer[tabindex='0']").count() == 1
    answers.first.focus()
    focused = "document.activeElement.ariaLabel"
    names = []
    for key in (
        "ArrowRight",
        "ArrowDown",
        "ArrowLeft",
        "End",
        "Control+End",
        "Home",
        "Control+Home",
        "ArrowUp",
    ):
        page.tab.keyboard.press(key)
        names.append(", ".join(page.tab.evaluate(focused).split(", ")[:2]))
    assert names == [
        "plain, TORCH on sm90",
        "sliding window, TORCH on sm90",
        "sliding window, TORCH on cpu",
        "sliding window, FLASHINFER on sm90",
        "encoder, FLASHINFER on sm90",
        "encoder, TORCH on cpu",
        "plain, TORCH on cpu",
        "plain, TORCH on cpu",
    ]
    page.tab.keyboard.press("Enter")
    page.tab.get_by_role("dialog", name="plain").wait_for()
    page.tab.keyboard.press("Escape")
    assert page.tab.evaluate(focused).startswith("plain, TORCH on cpu")
    page.tab.keyboard.press("ArrowDown")
    page.tab.keyboard.press("Tab")
    assert page.tab.evaluate("document.activeElement.closest('#overview')") is None
    page.tab.keyboard.press("Shift+Tab")
    assert page.tab.evaluate(focused).startswith("sliding window, TORCH on cpu")


def test_the_list_of_cells_is_one_stop_too(open_page: Any) -> None:
    page = open_page(synthetic_matrix(), "#feature=sinks&backend=TORCH")
    page.tab.locator("#cells .open").first.focus()
    page.tab.keyboard.press("ArrowDown")
    assert (
        page.tab.evaluate("[...document.querySelectorAll('#cells .open')].indexOf(document.activeElement)")
        == 1
    )
    assert page.tab.locator("#cells .open[tabindex='0']").count() == 1


def test_the_keyboard_walks_the_page_in_few_stops(open_page: Any) -> None:
    page = open_page(synthetic_matrix())
    reached = page.tab.evaluate(
        "[...document.querySelectorAll('a[href], button, select, input, summary')]"
        ".filter((each) => each.tabIndex >= 0 && each.checkVisibility() && (each.name !== 'by' || each.checked)).length"
    )
    assert reached <= 25


def test_the_legend_is_above_the_table_and_the_sources_are_folded(open_page: Any) -> None:
    page = open_page(synthetic_matrix())
    legend, table = page.tab.locator("#legend"), page.tab.locator("#overview")
    assert "claimed, run on the device, and right" in legend.inner_text()
    assert legend.bounding_box()["y"] < table.bounding_box()["y"]
    assert page.tab.locator("#runs").is_hidden()
    page.tab.get_by_text("Where it comes from").click()
    assert "torch 2.11.0" in page.tab.locator("#runs").inner_text()


@pytest.fixture(scope="module")
def declared() -> Matrix:
    backends = (TritonBackend, FlashInferBackend, FlashAttn4Backend, TorchBackend)
    return Matrix(tuple(declare(backend, device) for device in ("sm80", "sm90") for backend in backends))


def test_a_combination_without_a_cell_is_not_sampled_and_answered_by_its_pairs(
    open_page: Any, declared: Matrix
) -> None:
    hash_ = "#device=sm80&feature=sinks&head_size=72&kv_cache_dtype=fp8_e4m3&phase=decode"
    page = open_page(declared, hash_)
    text = page.tab.locator("#none").inner_text()
    assert "Not sampled." in text
    lines = [" ".join(line.split()) for line in page.tab.locator("#none li").all_inner_texts()]
    assert lines[0] == (
        "TRITON on sm80 refused combination not supported: fp8_e4m3 needs compute capability 8.9; fp8_e5m2 does not"
    )
    assert lines[3] == "TORCH on sm80 declared it serves each two of these values together"
    assert "attnplug matrix --device sm80 --only 'sinks/decode/d72/*/fp8_e4m3/*/*'" in text
    page.go("#device=sm80&feature=plain&kv_cache_dtype=fp8_e4m3&phase=decode")
    assert (
        "no sampled layer has feature plain with KV dtype fp8_e4m3" in page.tab.locator("#none").inner_text()
    )


def test_the_answer_by_pairs_is_what_the_classes_say(open_page: Any, declared: Matrix) -> None:
    page = open_page(declared)
    backends = {
        each.get_name(): each for each in (TritonBackend, FlashInferBackend, FlashAttn4Backend, TorchBackend)
    }
    random = Random(0)
    questions, expected = [], []
    for number, run in enumerate(declared.runs):
        backend, device = backends[run.backend], Device.parse(run.device)
        axes, latents = axes_of(backend), own_latents(backend)
        while len(questions) < 200 * (number + 1):
            cell = Cell(*(random.choice(values) for values in axes.values()))
            if all(goes_with(cell.feature, axis, getattr(cell, axis), latents) for axis in list(axes)[1:]):
                questions.append([number, [getattr(cell, axis) for axis in AXIS_NAMES]])
                expected.append(not cell_reasons(backend, device, cell))
    found = page.tab.evaluate(
        "questions => questions.map(([run, values]) => answerByPairs(run, values.map((value, axis) => "
        "[axis, axes[axis].values.indexOf(value)])).served)",
        questions,
    )
    assert found == expected
    assert {True, False} <= set(expected)


def test_an_answer_that_is_served_with_one_value_only_says_so(open_page: Any, declared: Matrix) -> None:
    page = open_page(declared)
    page.tab.get_by_role("button", name="fp8 KV, TRITON on sm80, declared, fp8_e5m2 only").click()
    dialog = page.tab.get_by_role("dialog", name="fp8 KV")
    assert "fp8_e5m2 only" in dialog.inner_text()
