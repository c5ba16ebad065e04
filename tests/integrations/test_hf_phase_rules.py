"""Rules for one phase choose the backend of each call: a call of transformers is all prefill or all decode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hf_models import DECODERS, ENCODERS

from attnplug import AttentionBackend, Registry, hookimpl, use
from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.integrations.transformers import attention_decisions
from attnplug.registry import default

calls: list[tuple[str, int]] = []


def counting(backend_name: str) -> type[AttentionBackend]:
    class CountingImpl(TorchImpl):
        def attend(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            calls.append((backend_name, args[1].shape[0]))
            return super().attend(*args, **kwargs)

    class Counting(TorchBackend):
        @staticmethod
        def get_name() -> str:
            return backend_name

        @classmethod
        def get_priority(cls, spec: object, device: object, phase: object) -> int:
            return 500

        @staticmethod
        def get_impl_cls() -> type[TorchImpl]:
            return CountingImpl

    return Counting


class Plugin:
    ATTNPLUG_API = (1, 1)

    @hookimpl
    def attnplug_backends(self) -> list[type[AttentionBackend]]:
        return [counting("FIRST"), counting("SECOND")]


@pytest.fixture(autouse=True)
def two_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(default, "_registry", Registry({"two": Plugin()}))
    calls.clear()
    yield
    calls.clear()


@pytest.mark.parametrize(
    ("rules", "prefill", "decode"),
    [
        ("FIRST,decode=SECOND", "FIRST", "SECOND"),
        ("SECOND,prefill=FIRST", "FIRST", "SECOND"),
        ("decode=FIRST,prefill=SECOND", "SECOND", "FIRST"),
        ("SECOND", "SECOND", "SECOND"),
    ],
)
@pytest.mark.parametrize("source", ["use", "environment"])
def test_generate_keeps_the_rules_of_both_phases(
    rules: str, prefill: str, decode: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, eager = DECODERS["llama"].pair()
    prompt, more = torch.arange(2, 9)[None], {"max_new_tokens": 3, "do_sample": False}
    if source == "environment":
        monkeypatch.setenv("ATTNPLUG_BACKEND", rules)
    with torch.no_grad(), use(rules if source == "use" else None):
        found = ours.generate(prompt, **more)
    assert found.tolist() == eager.generate(prompt, **more).tolist()
    layers = len(attention_decisions(ours))
    assert calls == [(prefill, 7)] * layers + [(decode, 1)] * (2 * layers)


def test_a_rule_for_a_layer_comes_before_one_for_a_phase() -> None:
    ours, _ = DECODERS["llama"].pair()
    with torch.no_grad(), use("FIRST,decode=SECOND,model.layers.1.*=FIRST"):
        ours.generate(torch.arange(2, 9)[None], max_new_tokens=2, do_sample=False)
    layers = len(attention_decisions(ours))
    assert calls[layers:] == [("FIRST" if index == 1 else "SECOND", 1) for index in range(layers)]


def test_an_encoder_has_no_decodes() -> None:
    ours, _ = ENCODERS["bert"].pair()
    with torch.no_grad(), use("FIRST,decode=SECOND"):
        ours(torch.tensor([[5]]))
    assert {name for name, _ in calls} == {"FIRST"}
