"""Real models on a GPU in bfloat16, through transformers and the example engine, on each backend."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

pytest.importorskip("transformers", minversion="5.15")

import torch
from logit_bounds import check_logits
from model_families import FAMILIES, MANY
from model_runs import RUNS, make_texts, references, refusal, whole_text

from attnplug.backends.flashinfer import FlashInferBackend
from attnplug.backends.flashinfer.options import Options

pytestmark = [
    pytest.mark.gpu,
    # What kernel libraries warn of when they are imported or compile is none of attnplug's warnings.
    pytest.mark.filterwarnings("default", "error:::attnplug"),
]

ALWAYS = ("TORCH", "TRITON")
"""They serve every family here: a refusal is a failure."""


LIBRARIES = ("FLASH_ATTN_2", "FLASH_ATTN_4", "FLASHINFER")
# Transformers has no phases: its calls bring their keys.
COMPOSITES = ("FLASH_ATTN_4+FLASHINFER", "FLASH_ATTN_4+TRITON")


@dataclasses.dataclass(frozen=True, slots=True)
class Fa2Options(Options):
    """Prefill on fa2, unless the user says otherwise."""

    prefill_backend: Literal["auto", "fa2", "fa3"] = "fa2"


@pytest.mark.parametrize(
    ("run", "backend"),
    [
        *(("transformers", backend) for backend in (*ALWAYS, *LIBRARIES)),
        *(("engine", backend) for backend in (*ALWAYS, *LIBRARIES, *COMPOSITES)),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_bfloat16_are_as_exact_as_torchs(run: str, family: str, backend: str) -> None:
    reason = refusal(family, MANY, "cuda", backend, run)
    if reason is not None and backend not in ALWAYS:
        pytest.skip(reason)
    assert reason is None
    check_logits(RUNS[run](family, MANY, "cuda", backend), references(family, MANY, "cuda"))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_exact_where_flashinfer_prefills_on_fa2(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the GPU has fa3, that is what the test above runs."""
    reason = refusal(family, MANY, "cuda", "FLASHINFER", "engine")
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(FlashInferBackend, "Options", Fa2Options)
    check_logits(RUNS["engine"](family, MANY, "cuda", "FLASHINFER"), references(family, MANY, "cuda"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exact_logits_are_those_of_transformers_own_attention(family: str) -> None:
    model = FAMILIES[family].make_model(MANY, torch.float32, "cuda")
    model.set_attn_implementation("eager")
    for text, reference in zip(make_texts(MANY), references(family, MANY, "cuda"), strict=True):
        torch.testing.assert_close(whole_text(model, text), reference.exact, rtol=0, atol=1e-4)
