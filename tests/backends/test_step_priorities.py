"""The ranges of steps that built-in backends declare, for the layers and GPUs that were measured and no others."""

from __future__ import annotations

import pytest

import attnplug
from attnplug import Device, LayerSpec, Phase
from attnplug.backends.flash_attn.backend import FlashAttn2Backend, FlashAttn4Backend
from attnplug.backends.flashinfer.backend import FlashInferBackend
from attnplug.backends.triton.backend import TritonBackend
from attnplug.core import StepKind

HOPPER, AMPERE, CPU = Device("cuda", (9, 0)), Device("cuda", (8, 0)), Device("cpu")


def layer(heads: int = 32, kv_heads: int = 8, size: int = 128, **fields: object) -> LayerSpec:
    return LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=size, **fields)  # type: ignore[arg-type]


def ranges(backend, spec: LayerSpec, device: Device = HOPPER) -> list[str]:
    return [f"{each.steps}: {each.priority}" for each in backend.get_step_priorities(spec, device)]


_SEVERAL, _MIXED = "prefill query 385..1024 requests 2..: 243", "mixed rows ..1280: 243"


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (128, ["prefill query ..2048: 243", _MIXED]),
        (112, ["prefill query ..2048: 243"]),
        (96, ["prefill query ..384: 243", _SEVERAL]),
        (80, ["prefill query ..128: 243"]),
        (64, ["prefill query ..1024: 243"]),
        (256, ["prefill query ..128: 243"]),
    ],
)
def test_triton_ranks_short_prompts_before_flash_attention_4(size: int, found: list[str]) -> None:
    spec = layer(size=size)
    assert ranges(TritonBackend, spec) == found
    assert FlashAttn4Backend.get_priority(spec, HOPPER, Phase.PREFILL) < 243
    assert ranges(TritonBackend, spec, AMPERE) == ranges(TritonBackend, spec, CPU) == []


@pytest.mark.parametrize("fields", [{"sliding_window": 4096}, {"chunk_size": 8192}])
def test_prefills_with_limits_are_ranked_first_up_to_1024_tokens(fields: dict[str, object]) -> None:
    assert ranges(TritonBackend, layer(**fields)) == ["prefill query ..1024: 243", _MIXED]


@pytest.mark.parametrize("fields", [{"logits_soft_cap": 2000.0}, {"has_alibi": True}, {"dtype": "float32"}])
def test_longer_prefills_of_the_slower_kernel_are_not_ranked_first(fields: dict[str, object]) -> None:
    assert ranges(TritonBackend, layer(**fields)) == ["prefill query ..384: 243"]
    several = "prefill query 129..384 requests 4..: 243"
    assert ranges(TritonBackend, layer(size=64, **fields)) == ["prefill query ..128: 243", several]


def test_drafts_that_run_on_prefill_kernels_are_ranked_as_what_they_are() -> None:
    spec = layer()
    assert ranges(FlashInferBackend, spec) == ["draft: 205"]
    assert ranges(FlashInferBackend, spec, AMPERE) == []
    assert FlashInferBackend.drafts_on_prefill
    assert FlashAttn2Backend.drafts_on_prefill
    assert not FlashAttn4Backend.drafts_on_prefill
    assert FlashAttn4Backend.get_priority(spec, HOPPER, Phase.DECODE) > 205


def test_a_plan_without_triton_drafts_on_flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BLOCK_PLUGINS", "attnplug:triton")
    made = attnplug.plan({"l": layer()}, "h100", registry=attnplug.Registry(), assume_installed="all")
    decision = made.decisions["l"]
    assert decision.backend == "FLASH_ATTN_4+FLASHINFER"
    drafts = [str(each) for each in decision.steps if each.steps.kind is StepKind.DRAFT]
    assert drafts == [
        "decodes of several tokens run on FLASH_ATTN_4: priority 210 for such steps, and FLASHINFER has 205"
    ]
