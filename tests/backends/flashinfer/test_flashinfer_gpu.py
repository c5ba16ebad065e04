"""FLASHINFER passes the conformance kit on a GPU, with either template of prefill."""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest
import torch

from attnplug.backends.flashinfer import FlashInferBackend
from attnplug.backends.flashinfer.options import Options
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.registry.plugins.installed import missing_requirements
from attnplug.testing import assert_close, paged_batch, parametrize_with_checks, tolerance

if TYPE_CHECKING:
    from attnplug.backends.flashinfer.step import Part

LACKING = missing_requirements(FlashInferBackend.requires)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(LACKING), reason=", ".join(map(str, LACKING))),
    # What the library warns of when it compiles is none of attnplug's warnings.
    pytest.mark.filterwarnings("default", "error:::attnplug"),
]


@dataclasses.dataclass(frozen=True, slots=True)
class Fa2Options(Options):
    """Prefill on fa2, unless the user says otherwise."""

    prefill_backend: Literal["auto", "fa2", "fa3"] = "fa2"


class FlashInferFa2(FlashInferBackend):
    """Prefill on fa2; without it, on fa3 where the GPU has it and the cache is not fp8."""

    Options: ClassVar[type[Any] | None] = Fa2Options


@parametrize_with_checks(FlashInferFa2)
def test_fa2(check):
    check()


@parametrize_with_checks(FlashInferBackend)
def test_fa3(check):
    check()


@pytest.mark.parametrize("size", [3, 5])
def test_as_many_decodes_are_planned_by_the_planner_alone(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own `plan()` is called for the first step, and the others are as right without."""
    from attnplug.backends.flashinfer.planned_wrapper import PlannedWrapper

    whole: list[int] = []
    plan_whole = PlannedWrapper._plan_whole

    def counted(self: PlannedWrapper, part: Part, *given: Any) -> None:
        whole.append(len(part.seq_lens))
        plan_whole(self, part, *given)

    monkeypatch.setattr(PlannedWrapper, "_plan_whole", counted)
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
    shapes = [[17 * step + 40 * row + 1 for row in range(size)] for step in range(4)]
    batches = [paged_batch(spec, [1] * size, lengths, block_size=16, device="cuda") for lengths in shapes]
    layers = {
        "0": types.SimpleNamespace(
            impl=FlashInferBackend.get_impl_cls().from_spec(spec, backend=FlashInferBackend, layer_name="0")
        )
    }
    builder = FlashInferBackend.get_builder_cls()(
        kv_cache_spec_for(spec, 16), ["0"], BuilderConfig(layers=layers), torch.device("cuda")
    )
    for batch in batches:
        output = torch.full_like(batch.query, torch.nan)
        metadata = builder.build(0, batch.common)
        layers["0"].impl.forward(None, batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)
        assert_close(output, batch.oracle().output, tolerance(spec).output)
    assert whole == [1, size]


@pytest.mark.slow
@parametrize_with_checks(FlashInferFa2, level="full")
def test_fa2_at_the_full_level(check):
    check()
