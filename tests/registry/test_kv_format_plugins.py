"""Formats of KV caches as plugins: registered with reasons, served by TORCH on the day they are written."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch

from attnplug.backends import torch_native
from attnplug.core import LayerSpec, kv_format
from attnplug.core.errors import NoBackendError
from attnplug.core.kv_format import KVFormat, Plane
from attnplug.planning import plan
from attnplug.registry import Registry, hookimpl

ROW = KVFormat(
    name="acme_int6",
    dtype="uint8",
    planes=(
        Plane(name="data", dtype="uint8", per_element=Fraction(3, 4)),
        Plane(name="scale", dtype="float16", per_row=1),
    ),
    codec=f"{__name__}:Int6",
    head_size_multiple=4,
    rms_error=0.05,
    worst_error=0.5,
)
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", kv_cache_dtype="acme_int6")


class Int6:
    """Four codes of six bits in three bytes, and a scale for each row."""

    def __init__(self, head_size: int) -> None:
        self.head_size = head_size

    def encode(self, rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        own = (rows.abs().amax(-1, keepdim=True) / 31).clamp(2.0**-14, 65504).half()
        codes = ((rows / own.float()).round().clamp(-31, 31) + 32).long().unflatten(-1, (-1, 4))
        word = (codes << torch.tensor([0, 6, 12, 18])).sum(-1)
        data = (word[..., None] >> torch.tensor([0, 8, 16])) & 255
        return data.flatten(-2).to(torch.uint8), own

    def decode(self, planes: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
        data, own = planes
        word = (data.long().unflatten(-1, (-1, 3)) << torch.tensor([0, 8, 16])).sum(-1)
        codes = ((word[..., None] >> torch.tensor([0, 6, 12, 18])) & 63).flatten(-2)
        return (codes - 32).float() * own.float()


def plugin(*rows: Any) -> types.ModuleType:
    made = types.ModuleType("acme")
    made.ATTNPLUG_API = (1, 1)  # type: ignore[attr-defined]

    @hookimpl
    def attnplug_kv_formats() -> tuple[Any, ...]:
        return rows

    made.attnplug_kv_formats = attnplug_kv_formats  # type: ignore[attr-defined]
    return made


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    before, owners = kv_format.TABLE, dict(kv_format._owners)
    yield
    kv_format.TABLE = before
    kv_format._owners.clear()
    kv_format._owners.update(owners)


def registry(*rows: Any) -> Registry:
    made = Registry(plugins=[torch_native])
    made.register(plugin(*rows), name="acme")
    return made


def test_a_format_of_a_plugin_is_served_by_torch_through_the_runtime() -> None:
    made = registry(ROW)
    layers = {"a": SPEC, "b": SPEC.replace(kv_cache_dtype="auto"), "c": SPEC.replace(dtype="bfloat16")}
    planned = plan(layers, device="cpu", registry=made)
    assert {each.backend for each in planned.decisions.values()} == {"TORCH"}


def test_without_the_plugin_select_and_plan_refuse_the_name_alike() -> None:
    made = Registry(plugins=[torch_native])
    decision = made.explain(SPEC, "cpu")
    assert decision.backend is None
    with pytest.raises(NoBackendError, match="kv_cache_dtype not supported: acme_int6 is not one of auto"):
        plan({"a": SPEC}, device="cpu", registry=made)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "Acme"}, "name='Acme' must be small letters"),
        ({"name": "fp8"}, "name='fp8' is the name of another KV format"),
        ({"aliases": ("nvfp4",)}, "is the name of another KV format"),
        ({"name": "float8_acme"}, "name='float8_acme' must be small letters"),
        ({"head_size_multiple": 0}, "head_size_multiple=0 of acme_int6 must be an integer of at least 1"),
        ({"codec": "acme"}, "codec='acme' of acme_int6 must be the name of a class"),
        ({"planes": ()}, "planes=.* of acme_int6 must be Planes"),
        ({"worst_error": 0.0}, "worst_error=0.0 of acme_int6 must be above 0"),
    ],
)
def test_a_wrong_format_breaks_its_plugin_alone(changes: dict[str, Any], reason: str) -> None:
    made = Registry(plugins=[torch_native])
    with pytest.raises(Exception, match=reason):
        made.register(plugin(dataclasses.replace(ROW, **changes)), name="acme")
    assert "acme_int6" not in [row.name for row in kv_format.kv_formats()]


def test_a_name_that_two_formats_of_a_plugin_have_is_refused() -> None:
    made = Registry(plugins=[torch_native])
    other = dataclasses.replace(ROW, name="acme_int3", aliases=("acme_int6",))
    with pytest.raises(Exception, match="name='acme_int6' is the name of another KV format of this plugin"):
        made.register(plugin(ROW, other), name="acme")
    assert "acme_int6" not in [row.name for row in kv_format.kv_formats()]


def test_what_is_no_format_is_refused() -> None:
    made = Registry(plugins=[torch_native])
    with pytest.raises(Exception, match="which is not a KVFormat"):
        made.register(plugin("acme_int6"), name="acme")
