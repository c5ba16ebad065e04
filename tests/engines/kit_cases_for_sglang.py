"""SGLang's own kit of attention cases, unchanged: real pools and layers, a fake runner, and its own reference.

It runs in SGLang's environment alone, with the plugin `sglang_harness`; `test_sglang.py` starts it.
"""

from __future__ import annotations

import os
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner as graphs
from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_extend_runner as extends
from sglang.test.kits.attention_unittest.runner_modes import speculative_target_verify_runner as verifies
from sglang.test.kits.attention_unittest.runner_modes import split_op_runner as splits

from attnplug.core.errors import BatchError

BACKENDS = os.environ.get("ATTNPLUG_HARNESS", "attnplug").split(",")
PLACE: dict[str, Any] = {
    "dtype": getattr(torch, os.environ.get("ATTNPLUG_HARNESS_DTYPE", "float32")),
    "device": os.environ.get("ATTNPLUG_HARNESS_DEVICE", "cpu"),
}
CASE = unittest.TestCase()
Case = dense.DenseAttentionCase


def given(backend: str) -> Iterator[Case]:
    """The kit's cases of dense layers and windows."""
    yield from dense.make_dense_cases(backend)
    yield from dense.make_swa_no_prefix_input_config_cases(backend)
    yield from dense.make_swa_prefix_input_config_cases(backend)


def more(backend: str) -> Iterator[Case]:
    """Cases in the kit's form for what it leaves out: windows of decodes, mixed steps and larger pages."""
    common: dict[str, Any] = {"backend": backend, "num_heads": 4, "num_kv_heads": 2}
    decode, mixed = (
        {**common, "forward_mode": ForwardMode.DECODE},
        {**common, "forward_mode": ForwardMode.MIXED},
    )
    yield Case(name="swa_decode", page_size=16, prefix_lens=(3, 9, 20), sliding_window_size=4, **decode)
    yield Case(name="swa_decode_page1", page_size=1, prefix_lens=(3, 9, 20), sliding_window_size=4, **decode)
    yield Case(name="decode_page64", page_size=64, prefix_lens=(3, 40, 20), **decode)
    yield Case(name="mixed_page1", page_size=1, prefix_lens=(0, 7, 19), extend_lens=(9, 4, 1), **mixed)


def drafts(backend: str, mode: ForwardMode, **fields: Any) -> Case:
    """A case of three tokens for each of two requests."""
    common = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "page_size": 16,
        "prefix_lens": (7, 16),
        "extend_lens": (3, 3),
    }
    name = f"{mode.name.lower()}_{'_'.join(fields)}"
    return Case(name=name, backend=backend, forward_mode=mode, **{**common, **fields})


def named(cases: Iterator[Case]) -> list[Any]:
    return [pytest.param(case, id=f"{case.backend}-{case.name}") for case in cases]


ALL = named(case for backend in BACKENDS for make in (given, more) for case in make(backend))
DECODES = [param for param in ALL if param.values[0].forward_mode.is_decode()]
EXTENDS = named(case for backend in BACKENDS for case in given(backend) if not case.forward_mode.is_decode())


@pytest.mark.parametrize("layout", ["shuffled_pages", "interleaved_pages"])
@pytest.mark.parametrize("case", ALL)
def test_steps(case: Case, layout: str) -> None:
    dense.run_dense_attention_case(CASE, case, loc_layout=layout, **PLACE)


@pytest.mark.parametrize("case", DECODES)
def test_decodes_of_graphs(case: Case) -> None:
    graphs.run_dense_cuda_graph_decode_case(CASE, case, **PLACE)


@pytest.mark.parametrize("breakable", [False, True], ids=["piecewise", "breakable"])
@pytest.mark.parametrize("case", EXTENDS)
def test_prompts_between_graphs(case: Case, breakable: bool) -> None:
    padded = case.num_input_tokens + 5
    splits.run_dense_split_op_extend_case(CASE, case, breakable=breakable, static_num_tokens=padded, **PLACE)


VERIFIED: list[dict[str, Any]] = [{}, {"sliding_window_size": 4}, {"page_size": 1}]


@pytest.mark.parametrize("kind", ["eagle", "frozen_kv_mtp", "dflash"])
@pytest.mark.parametrize("fields", VERIFIED, ids=lambda fields: "_".join(fields) or "plain")
@pytest.mark.parametrize("backend", BACKENDS)
def test_verified_drafts(backend: str, fields: dict[str, Any], kind: Any) -> None:
    case = drafts(backend, ForwardMode.TARGET_VERIFY, **fields)
    verifies.run_dense_spec_verify_case(CASE, case, topk=1, spec_kind=kind, **PLACE)
    # With pages of one token the kit writes prefixes of its graphs over other tokens of its own.
    if case.page_size > 1:
        verifies.run_dense_spec_verify_cuda_graph_case(CASE, case, topk=1, spec_kind=kind, **PLACE)


@pytest.mark.parametrize(("kind", "topk"), [("eagle", 2), ("ngram", 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_with_branches_are_refused(backend: str, kind: Any, topk: int) -> None:
    case = drafts(backend, ForwardMode.TARGET_VERIFY)
    with pytest.raises(BatchError, match=r"a mask of its own.*--speculative-eagle-topk 1"):
        verifies.run_dense_spec_verify_case(CASE, case, topk=topk, spec_kind=kind, **PLACE)


@pytest.mark.parametrize("padding", ["small_real", "prod_fill"])
@pytest.mark.parametrize("fields", VERIFIED, ids=lambda fields: "_".join(fields) or "plain")
@pytest.mark.parametrize("backend", BACKENDS)
def test_draft_models_extend_in_graphs(backend: str, fields: dict[str, Any], padding: str) -> None:
    case = drafts(backend, ForwardMode.DRAFT_EXTEND_V2, **fields)
    extends.run_dense_draft_extend_v2_cuda_graph_case(CASE, case, pad_style=padding, **PLACE)
