"""The frozen values of core: slotted, unchangeable, and by name where there are many fields."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spec_strategies import DIMS, SIZES

from attnplug.core import (
    BuilderConfig,
    ChunkedLocalAttentionSpec,
    ContextParallel,
    CrossAttentionSpec,
    Device,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    LayerSpec,
    LayerTensors,
    MLAAttentionSpec,
    MLADims,
    MultipleOf,
    SlidingWindowSpec,
    SparseSpec,
)

PAGE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
BY_NAME = [
    LayerSpec(**SIZES),
    DIMS,
    BuilderConfig(),
    FullAttentionSpec(**PAGE),
    SlidingWindowSpec(**PAGE, sliding_window=4),
    ChunkedLocalAttentionSpec(**PAGE, chunk=4),
    CrossAttentionSpec(**PAGE),
    MLAAttentionSpec(**PAGE),
]
BY_PLACE = [
    Device("cpu"),
    MultipleOf(16),
    KVCacheTensor(64, ("layers.0",)),
    KVCacheGroupSpec(("layers.0",), FullAttentionSpec(**PAGE)),
    KVCacheConfig(1, (), ()),
    LayerTensors(),
]


def kind(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("value", BY_NAME + BY_PLACE, ids=kind)
def test_a_value_cannot_be_changed_or_extended(value: Any) -> None:
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, getattr(value, field))
    assert not hasattr(value, "__dict__")


@pytest.mark.parametrize("value", BY_NAME, ids=kind)
def test_many_fields_go_by_name_only(value: Any) -> None:
    arguments = [getattr(value, field.name) for field in dataclasses.fields(value) if field.init]
    with pytest.raises(TypeError, match="positional"):
        type(value)(*arguments)


@pytest.mark.parametrize("value", BY_NAME + BY_PLACE, ids=kind)
def test_a_value_prints_its_public_fields(value: Any) -> None:
    fields = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
    assert repr(value).startswith(f"{kind(value)}({fields[0]}=")
    assert all(f"{name}=" in repr(value) for name in fields)
    assert "_hash=" not in repr(value)
    assert "_derived=" not in repr(value)


def test_tensors_of_a_layer_are_compared_by_identity() -> None:
    one, other = (LayerTensors(sinks=torch.zeros(2)) for _ in range(2))
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def test_a_value_of_dimensions_is_equal_to_its_like() -> None:
    assert dataclasses.replace(DIMS) == DIMS
    assert hash(dataclasses.replace(DIMS)) == hash(DIMS)
    assert isinstance(DIMS, MLADims)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(
    "value",
    [
        *(each for each in BY_NAME + BY_PLACE if not isinstance(each, LayerTensors)),
        Device("cuda", (9, 0), "NVIDIA H200"),
        MultipleOf(16, (48,)),
        SparseSpec("block", 8, 64),
        ContextParallel(4, 1, 16),
        FullAttentionSpec(**PAGE, head_size_v=64),
    ],
    ids=kind,
)
def test_a_copy_is_the_value_in_every_field_and_type(value: Any, way: str) -> None:
    copied = COPIES[way](value)
    assert type(copied) is type(value)
    assert copied == value
    assert repr(copied) == repr(value)
    for field in dataclasses.fields(value):
        # A hash of text differs in each process, but not in this one.
        assert getattr(copied, field.name) == getattr(value, field.name) or (
            way == "replace" and field.name == "_derived"
        )


@pytest.mark.parametrize(
    "value",
    [
        Device("cpu"),
        Device("cuda", (9, 0), "NVIDIA H200"),
        Device.parse("MI300X"),
        ContextParallel(4, 1, 16),
        LayerSpec(**SIZES),
        LayerSpec(**SIZES, causal=False, scale=0.5, window=(4, 2), sparse=SparseSpec("token_topk", 8)),
        LayerSpec(num_heads=4, num_kv_heads=1, head_size=DIMS.latent_size, mla=DIMS),
    ],
    ids=kind,
)
def test_a_value_from_json_is_the_value_in_every_field_and_type(value: Any) -> None:
    read = type(value).from_dict(json.loads(json.dumps(value.to_dict())))
    assert read == value
    assert repr(read) == repr(value)
    assert all(getattr(read, each) == getattr(value, each) for each in type(value).__slots__)
