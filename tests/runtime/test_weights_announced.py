"""Each client tells an impl once, before its first call, that the weights are loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_backends import backend, offered
from model_layers import layer
from served_model import ServedModel

import attnplug
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import AttentionBackend, Device
from attnplug.core.composite import composite_backend
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.conformance.calls import outputs
from attnplug.testing.conformance.numbers import cache_writes
from attnplug.testing.conformance.target import Target

FULL = layer(dtype="float32")


class Announced(TorchImpl):
    """Runs only if it was told exactly once; keeps all that were made."""

    made: list[Announced]

    def _bind(self, *given: Any, **named: Any) -> None:
        super()._bind(*given, **named)
        self.told: list[torch.dtype] = []
        self.made.append(self)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.told.append(act_dtype)

    def update_kv_cache(self, *given: Any) -> None:
        assert len(self.told) == 1
        super().update_kv_cache(*given)

    def attend(self, *given: Any, **named: Any) -> torch.Tensor:
        assert len(self.told) == 1
        return super().attend(*given, **named)


@pytest.fixture
def impl() -> type[Announced]:
    return type("Fresh", (Announced,), {"made": []})


def announced(name: str, impl: type[Announced], **attributes: Any) -> type[AttentionBackend]:
    return backend(name, get_impl_cls=lambda: impl, **attributes)


def told(impl: type[Announced]) -> list[list[torch.dtype]]:
    return [each.told for each in impl.made]


def test_a_runtime_tells_every_layer(impl: type[Announced]) -> None:
    with offered(announced("STRICT", impl)):
        model = ServedModel({"0": FULL, "1": FULL, "2": layer(dtype="float32")}, kv_sharing={"2": "0"})
        model.add("a")
        model.step(a=9)
        model.step(a=1)
    assert told(impl) == [[torch.float32]] * 3


def test_a_runtime_tells_both_members_of_a_composite(impl: type[Announced]) -> None:
    class Ordered(TorchMetadataBuilder):
        reorder_batch_threshold = 1

    decoder = announced("D", impl, supported_phases=("decode",), get_builder_cls=lambda: Ordered)
    with offered(decoder, announced("P", impl, supported_phases=("prefill",))):
        model = ServedModel({"0": FULL}, per_phase=True)
        model.add("a")
        model.add("b")
        model.step(a=9)
        model.step(a=1, b=7)
    assert model.plan.backends == ("P+D",)
    assert told(impl) == [[torch.float32]] * 2


def test_a_backend_chosen_by_use_is_told(impl: type[Announced]) -> None:
    with offered(announced("STRICT", impl, priority=1)), attnplug.use("STRICT"):
        model = ServedModel({"0": layer(dtype="bfloat16")})
        model.add("a")
        model.step(a=3)
    assert told(impl) == [[torch.bfloat16]]


def test_run_batch_tells(impl: type[Announced]) -> None:
    run_batch(announced("STRICT", impl), paged_batch(FULL, [1, 9], [20, 9]))
    assert told(impl) == [[torch.float32]]


def test_a_composite_of_run_batch_tells_both(impl: type[Announced]) -> None:
    made = composite_backend(announced("P", impl), announced("D", impl))
    run_batch(made, paged_batch(FULL, [1, 9], [20, 9]))
    assert told(impl) == [[torch.float32]] * 2


def test_the_conformance_kit_tells(impl: type[Announced]) -> None:
    target = Target(announced("STRICT", impl), Device("cpu"))
    wanted = ("tensors/deterministic-mixed", "cache/shar")
    checks = [c for group in (outputs, cache_writes) for c in group.checks(target) if c.id.startswith(wanted)]
    assert len(checks) >= 2
    for check in checks:
        check()
    assert told(impl)
    assert {len(each) for each in told(impl)} == {1}


def test_the_attention_of_transformers_tells_each_layer(impl: type[Announced]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from attnplug.integrations.transformers import register

    register()
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=16, intermediate_size=32
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="attnplug").eval()
    with offered(announced("STRICT", impl)), torch.no_grad():
        for length in (5, 5, 7):
            model(torch.ones(1, length, dtype=torch.long))
    assert told(impl) == [[torch.float32]] * 2
