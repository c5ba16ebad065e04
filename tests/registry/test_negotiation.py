"""Layers with like caches agree on one block size and one layout, or the backends at fault are named."""

from __future__ import annotations

from typing import Any

import pytest
from fake_plugins import CPU, SLIDING, SPEC, backend, registry

from attnplug import AttentionBackend, Decision, LayerSpec, Phase
from attnplug.core import MultipleOf
from attnplug.errors import LayoutError

LAYERS = {"model.0": SPEC, "model.1": SPEC.replace(logits_soft_cap=30.0)}
RULES = "A,*.1=B"


def sized(name: str, *sizes: int | MultipleOf, **attributes: Any) -> type[AttentionBackend]:
    return backend(name, get_supported_kernel_block_sizes=lambda spec=None, device=None: sizes, **attributes)


def settled(*backends: type[AttentionBackend], layers: dict[str, LayerSpec] = LAYERS) -> dict[str, Decision]:
    return registry(*backends).select_layers(layers, CPU, backend=RULES)


@pytest.mark.parametrize(
    ("of_a", "of_b", "agreed"),
    [
        ((MultipleOf(16),), (MultipleOf(1),), 16),
        ((MultipleOf(1),), (MultipleOf(32),), 32),
        ((16, 64), (64, 128), 64),
        ((MultipleOf(16),), (24, 48), 48),
        ((MultipleOf(16),), (MultipleOf(24),), 48),
        ((128,), (MultipleOf(64), 16), 128),
    ],
)
def test_two_backends_agree_on_a_block_size_that_both_read(
    of_a: tuple[int | MultipleOf, ...], of_b: tuple[int | MultipleOf, ...], agreed: int
) -> None:
    decisions = settled(sized("A", *of_a), sized("B", *of_b))
    assert [decision.backend for decision in decisions.values()] == ["A", "B"]
    assert {decision.block_size for decision in decisions.values()} == {agreed}


def test_sizes_that_no_two_backends_share_are_an_error_that_names_both() -> None:
    with pytest.raises(LayoutError) as error:
        settled(sized("A", 16, 32), sized("B", MultipleOf(64)))
    assert str(error.value) == (
        "block_size=None cannot be agreed on by layers with like caches: A (layer model.0) takes 16, 32; "
        "B (layer model.1) takes multiples of 64; ask for one backend for all of them"
    )


def layouts(name: str, *order: str) -> type[AttentionBackend]:
    return backend(name, supported_kv_cache_layouts=lambda: order)


def test_two_backends_agree_on_a_layout() -> None:
    decisions = settled(layouts("A", "NHD", "HND"), layouts("B", "HND"))
    assert {decision.kv_cache_layout for decision in decisions.values()} == {"HND"}


def test_layouts_that_no_two_backends_share_are_an_error_that_names_both() -> None:
    with pytest.raises(LayoutError) as error:
        settled(layouts("A", "NHD"), layouts("B", "HND"))
    assert "kv_cache_layout=None cannot be agreed on" in str(error.value)
    assert "A (layer model.0) takes NHD; B (layer model.1) takes HND" in str(error.value)


def test_layers_with_unlike_caches_need_not_agree() -> None:
    layers = {"model.0": SPEC, "model.1": SLIDING}
    decisions = settled(sized("A", 16), sized("B", 64), layers=layers)
    assert [decision.block_size for decision in decisions.values()] == [16, 64]


def test_layers_without_pages_need_not_agree() -> None:
    layers = {name: spec.replace(direct_kv=True) for name, spec in LAYERS.items()}
    decisions = settled(sized("A", 16), sized("B", 64), layers=layers)
    assert [decision.block_size for decision in decisions.values()] == [None, None]


def test_a_block_size_given_by_the_engine_is_kept() -> None:
    layers = {name: spec.replace(block_size=64) for name, spec in LAYERS.items()}
    decisions = settled(sized("A", MultipleOf(16)), sized("B", 64, 128), layers=layers)
    assert [decision.block_size for decision in decisions.values()] == [64, 64]


def by_cap(name: str, plain: int | MultipleOf, capped: int | MultipleOf) -> type[AttentionBackend]:
    def sizes(spec: Any = None, device: Any = None) -> tuple[int | MultipleOf, ...]:
        return (plain,) if spec is None or spec.logits_soft_cap is None else (capped,)

    return backend(name, get_supported_kernel_block_sizes=sizes)


def test_one_backend_that_reads_other_sizes_for_other_layers_agrees_with_itself() -> None:
    found = registry(by_cap("A", MultipleOf(16), MultipleOf(64))).select_layers(LAYERS, CPU)
    assert {decision.block_size for decision in found.values()} == {64}
    with pytest.raises(LayoutError, match=r"A \(layer model\.0\) takes 16; A \(layer model\.1\) takes 64"):
        registry(by_cap("A", 16, 64)).select_layers(LAYERS, CPU)


def test_both_phases_of_a_layer_agree() -> None:
    decode = sized("DECODE", 64, 128, priority=90, supported_phases=("decode",))
    both = registry(decode, sized("REST", MultipleOf(16)))
    found = both.decide_layers({"model.0": SPEC}, CPU, tuple(Phase))
    assert {phase: layers["model.0"].backend for phase, layers in found.items()} == {
        "decode": "DECODE",
        "prefill": "REST",
    }
    assert {layers["model.0"].block_size for layers in found.values()} == {64}


def test_layers_that_nobody_serves_are_left_out_of_it() -> None:
    found = registry(sized("A", 16), sized("B", 16, supported_dtypes=("float16",)))
    judged = found.decide_layers(LAYERS, CPU, backend=RULES)[None]
    assert [decision.backend for decision in judged.values()] == ["A", None]
