"""The numeric cases through each engine's client: right backends pass, wrong ones are named, and gaps have reasons."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mutants.masks
import mutants.softmax  # noqa: F401 - each import lists its mutants
import pytest
from catching import variant
from mutants.table import MUTANTS, Mutant
from sglang_stubs import fake_sglang

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionBackend, Device, LayerSpec
from attnplug.engines import flash_attn
from attnplug.engines.engine import Engine, rule_for
from attnplug.engines.table import ENGINES, read_engines
from attnplug.errors import PolicyError
from attnplug.registry.default import get_registry
from attnplug.testing.conformance import ConformanceError
from attnplug.testing.conformance.cases.cases import Case
from attnplug.testing.conformance.check import CheckSkipped
from attnplug.testing.conformance.numbers.correctness import check_case
from attnplug.testing.conformance.target import Target

__all__ = ["fake_sglang"]
CPU = Device("cpu")
PLAIN: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "cap": {"logits_soft_cap": 3.0},
    "encoder": {"attn_type": "encoder_only", "direct_kv": True},
    "direct": {"direct_kv": True},
    "non_causal": {"causal": False},
    "cross": {"attn_type": "encoder_decoder"},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "chunk": {"chunk_size": 24},
    "spans": {"mm_prefix": True},
    "lse": {"needs_lse": True},
    "values": {"head_size_v": 32},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "latent": {},
}
REFUSED = {
    "flash-attn": {"sinks", "chunk", "spans", "fp8", "values"},
    "transformers": {"alibi", "lse", "fp8"},
    "vllm": {"direct", "lse", "values"},
    "sglang": {"non_causal", "direct", "cross", "alibi", "lse", "spans", "values"},
}
"""By engine the layers that its calls cannot ask for."""
del LAYERS["latent"]
SHAPES = ("mixed", "decode", "prefill")


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine that is installed; SGLang with stand-ins for the classes that the client reads."""
    row = ENGINES[request.param]
    if row.name == "sglang" and row.absent:
        request.getfixturevalue("fake_sglang")
    elif row.absent:
        pytest.skip(row.absent)
    found = importlib.import_module(f"attnplug.engines.{row.module}").ENGINE
    assert isinstance(found, Engine)
    return found


class DecodesFirst(TorchBackend.get_builder_cls()):  # type: ignore[misc]
    """TORCH's builder, which relies on the order that its threshold promises."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.reorder_batch_threshold = 1

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        lens = common_attn_metadata.query_start_loc_cpu.diff()
        if (lens.gt(1).int().diff() < 0).any():
            raise RuntimeError(f"queries of {lens.tolist()} tokens: decodes are not in front")
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


ORDERED = variant("DECODES_FIRST", builder=DecodesFirst, get_priority=lambda cls, *given: 50)
MUTANTS.append(Mutant("decodes-first", "engines", ORDERED, "", ""))


@pytest.fixture
def offered(request: pytest.FixtureRequest) -> Iterator[type[AttentionBackend]]:
    """The mutant of that name, offered by a plugin."""
    backend = next(each.backend for each in MUTANTS if each.name == request.param)
    plugin = SimpleNamespace(ATTNPLUG_API=(1, 1), attnplug_backends=attnplug.hookimpl(lambda: (backend,)))
    attnplug.register(plugin, "wrong")
    yield backend
    get_registry().unregister("wrong")


def case(shape: str, **fields: Any) -> Case:
    return Case(LayerSpec(**PLAIN | fields), shape, 16, "NHD")


@pytest.mark.parametrize("layer", list(LAYERS))
def test_a_right_backend_passes_or_the_engine_says_why_it_cannot_ask(engine: Engine, layer: str) -> None:
    target = Target(engine.through(TorchBackend), CPU)
    spec = case("mixed", **LAYERS[layer]).spec
    reasons = target.reasons(spec)
    assert bool(reasons) is (layer in REFUSED[engine.name]), reasons
    assert all(reason.startswith(f"{engine.name}: ") for reason in reasons)
    if reasons:
        with pytest.raises(CheckSkipped, match=f"{engine.name}: "):
            target.require(spec)
        return
    for shape in SHAPES:
        if layer != "chunk" or engine.name != "vllm":
            check_case(target, case(shape, **LAYERS[layer]))


@pytest.mark.parametrize("layer", ["plain", "window", "spans", "sinks"])
def test_a_large_batch_of_transformers_is_run_in_parts(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from attnplug.engines import transformers

    parts, attend = list[int](), transformers._attend_rows
    monkeypatch.setattr(transformers, "_MOST_TOKENS", 300)
    monkeypatch.setattr(
        transformers, "_attend_rows", lambda call: (parts.append(call.common.num_reqs), attend(call))
    )
    target = Target(transformers.ENGINE.through(TorchBackend), CPU)
    for shape in SHAPES:
        parts.clear()
        check_case(target, case(shape, **LAYERS[layer]))
        assert len(parts) > 1
        assert max(parts) > 1


@pytest.mark.parametrize(
    ("offered", "layer"),
    [("window-not-for-prompts", "window"), ("scale-of-powers-of-two", "plain")],
    indirect=["offered"],
    ids=["window", "scale"],
)
def test_each_client_shows_a_wrong_backend(engine: Engine, offered: Any, layer: str) -> None:
    target = Target(engine.through(offered), CPU)
    wrong = case("mixed", **LAYERS[layer] | {"head_size": 80})
    with pytest.raises(ConformanceError) as caught:
        check_case(target, wrong)
    assert caught.value.step is not None
    if layer == "window":
        assert caught.value.named == "sliding window ignored"
        check_case(target, case("decode", **LAYERS[layer]))


@pytest.mark.parametrize("offered", ["decodes-first"], indirect=True)
@pytest.mark.parametrize("layer", ["plain", "lse", "spans", "encoder", "direct"])
def test_each_client_gives_a_builder_the_order_that_it_asks_for(
    engine: Engine, offered: Any, layer: str
) -> None:
    if layer in REFUSED[engine.name]:
        pytest.skip(f"{engine.name} has no such layers")
    target = Target(engine.through(offered), CPU)
    for shape in ("mixed", "idle"):
        if engine.name != "sglang" or shape == "mixed":
            check_case(target, case(shape, **LAYERS[layer]))


@pytest.mark.slow
def test_the_list_has_the_cases_of_the_engine_and_a_skip_for_each_value_beyond_it(engine: Engine) -> None:
    found = {check.id: check for check in engine.checks(Target(TorchBackend, CPU))}
    assert len(found) > 200
    lse = found.get("correct/mixed-h4x2-d64-float32-b16-NHD-lse")
    assert lse is not None
    if "lse" in REFUSED[engine.name]:
        with pytest.raises(CheckSkipped, match=r"log-sum-exp"):
            lse()


def test_an_engine_that_forgets_a_reason_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # A client that refuses more than the suite says is a failure, and not a skip.
    careless = dataclasses.replace(flash_attn.ENGINE, refusals=lambda spec: iter(()))
    target = Target(careless.through(TorchBackend), CPU)
    with pytest.raises(ConformanceError):
        check_case(target, case("mixed", has_sinks=True))


def test_a_class_that_no_plugin_offers_cannot_be_selected() -> None:
    class Unknown(TorchBackend):
        pass

    with pytest.raises(PolicyError, match="is not in the registry"):
        rule_for(Unknown)
    assert rule_for(TorchBackend) == "TORCH@attnplug"


def test_engines_are_named_once_in_the_order_of_the_table() -> None:
    assert [row.name for row in read_engines(["vllm, flash-attn", "vllm"])] == ["flash-attn", "vllm"]
    assert [row.name for row in read_engines(["all"])] == list(ENGINES)
    with pytest.raises(PolicyError, match="did you mean sglang"):
        read_engines(["sglan"])
