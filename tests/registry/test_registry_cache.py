"""What is remembered, what makes it forgotten, and that it holds with many threads."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_plugins import CPU, H100, SPEC, backend, plugin, registry

import attnplug
from attnplug import Decision, LayerSpec, Registry, use
from attnplug.backends.torch_native import TorchBackend
from attnplug.errors import SpecError


@pytest.fixture
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_an_equal_spec_gets_the_same_decision() -> None:
    found = registry(backend("A"))
    first = found.select(SPEC, CPU)
    assert found.select(LayerSpec(num_heads=4, num_kv_heads=2, head_size=64), "cpu") is first
    assert found.select(SPEC, CPU, None, backend=None) is first


def test_another_question_gets_another_decision() -> None:
    found = registry(backend("A"), backend("B"))
    first = found.select(SPEC, CPU)
    others = [
        found.select(SPEC.replace(head_size=128), CPU),
        found.select(SPEC, CPU, "decode"),
        found.select(SPEC, CPU, backend="B"),
        found.select(SPEC, CPU, assume_installed="all"),
        found.explain(SPEC, CPU),
        found.explain(SPEC, H100),
        found.select(SPEC, CPU, layer_name="model.0"),
    ]
    assert all(other != first for other in others)
    with use("B"):
        assert found.select(SPEC, CPU).backend == "B"
    assert found.select(SPEC, CPU) is first


def test_the_oldest_decisions_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug.registry.registry._MOST_DECISIONS", 2)
    found = registry(backend("A"))
    first = found.select(SPEC, CPU)
    for size in (128, 256):
        found.select(SPEC.replace(head_size=size), CPU)
    again = found.select(SPEC, CPU)
    assert again == first
    assert again is not first


def test_registering_drops_what_was_decided() -> None:
    found = registry(backend("A"))
    first = found.select(SPEC, CPU)
    found.register(plugin(backend("B", 90)), "later")
    assert found.select(SPEC, CPU) is not first
    assert found.select(SPEC, CPU).backend == "B"


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    found = registry(backend("A"), backend("B", device_types=("cuda",)))
    with caplog.at_level(logging.INFO, "attnplug"):
        found.explain(SPEC, CPU)
        assert caplog.records == []
        found.select(SPEC, CPU)
        found.select(SPEC, CPU, layer_name="model.0")
        found.select_layers({"model.1": SPEC}, CPU)
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("INFO", "attnplug")
    assert "A on cpu" in record.getMessage()
    assert "device type not supported: cpu is not cuda" in record.getMessage()


def test_threads_that_ask_the_same_at_once_get_one_decision(caplog: pytest.LogCaptureFixture) -> None:
    missed = threading.Event()
    opened = []

    class Watched(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            known = super().get(key, default)
            if threading.current_thread().name == "second":
                missed.set()
            return known

    def door() -> type[object]:
        opened.append(missed.wait(60))
        return TorchBackend.get_impl_cls()

    found = registry(backend("A", get_impl_cls=door))
    found._cache = Watched()
    decisions = []
    threads = [
        threading.Thread(target=lambda: decisions.append(found.select(SPEC, CPU)), name=name)
        for name in ("first", "second")
    ]
    with caplog.at_level(logging.INFO, "attnplug"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert decisions[0] is decisions[1]
    assert opened == [True]
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("_switching_often")
def test_threads_may_register_while_others_ask() -> None:
    found = registry(backend("BASE", 1))

    def ask(number: int) -> str | None:
        return found.select(SPEC.replace(head_size=16 * (1 + number % 5)), CPU).backend

    def register(number: int) -> str:
        return found.register(plugin(backend(f"B{number}", 10 + number)), f"plugin-{number}").name

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number) for number in range(200)]
        registered = [pool.submit(register, number) for number in range(20)]
        asked += [pool.submit(ask, number) for number in range(200)]
        assert {future.result() for future in registered} == {f"plugin-{number}" for number in range(20)}
        names = {"BASE", *(f"B{number}" for number in range(20))}
        assert {future.result() for future in asked} <= names
    assert found.select(SPEC, CPU).backend == "B19"
    assert len(found.backends()) == 21


def test_a_phase_is_one_of_two() -> None:
    found: Registry = registry(backend("A"))
    assert found.select(SPEC, CPU, "decode").phase == "decode"
    for ask in (found.select, found.explain):
        with pytest.raises(SpecError, match="phase='verify' must be one of decode, prefill"):
            ask(SPEC, CPU, "verify")
    with pytest.raises(SpecError, match="phase='verify' must be one of decode, prefill"):
        found.select_layers({"model.0": SPEC}, CPU, "verify")


@pytest.mark.parametrize("spec", [None, {"num_heads": 4}, "model.0"])
def test_a_spec_is_a_layer_spec(spec: object) -> None:
    with pytest.raises(SpecError, match="must be a LayerSpec"):
        registry(backend("A")).select(spec, CPU)  # type: ignore[arg-type]


def test_a_remembered_decision_of_an_equal_spec_has_the_spec_that_was_asked() -> None:
    found = registry(backend("A"))
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16}
    specs = [
        LayerSpec(**sizes),
        LayerSpec(**sizes, scale=0.25),
        LayerSpec(**sizes, head_size_v=16, causal=True),
    ]
    assert len(set(specs)) == 1
    for each in (*specs, *reversed(specs)):
        for decision in (
            found.select(each, CPU),
            found.explain(each, CPU, layer_name="a"),
            found.select_layers({"a": each}, CPU)["a"],
            attnplug.plan({"a": each}, CPU, registry=found).decisions["a"],
        ):
            read = Decision.from_dict(json.loads(json.dumps(decision.to_dict())))
            for spec in (decision.spec, read.spec):
                assert spec.derived == each.derived
                assert spec.replace(head_size=64).scale == each.replace(head_size=64).scale
