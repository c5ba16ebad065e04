"""Which layers can share one plan."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.core import LayerSpec, LayerTensors
from attnplug.core.errors import BatchError
from attnplug.core.hyperparameters import (
    PerLayerParameters,
    get_per_layer_parameters,
    group_by_hyperparameters,
    infer_global_hyperparameters,
)

PARAMETERS = st.builds(
    PerLayerParameters,
    window_left=st.sampled_from([-1, 127, 4095]),
    logits_soft_cap=st.sampled_from([None, 50.0]),
    sm_scale=st.sampled_from([0.125, 0.0884]),
    has_sinks=st.booleans(),
)
LAYERS = st.dictionaries(st.integers(0, 40).map("model.layers.{}".format), PARAMETERS, min_size=1)


class PortedImpl:
    """An impl with the attributes that authors know, and no spec."""

    def __init__(self, scale: float, **attributes: Any) -> None:
        self.scale = scale
        self.__dict__.update(attributes)


@given(LAYERS)
def test_global_values_are_the_first_layer_s_and_say_whether_all_agree(
    layers: dict[str, PerLayerParameters],
) -> None:
    before = copy.deepcopy(layers)
    found = infer_global_hyperparameters(layers)
    first = next(iter(layers.values()))
    assert found == first
    assert found.has_same_window_lefts is (len({params.window_left for params in layers.values()}) == 1)
    assert found.has_same_all_params is (len(set(layers.values())) == 1)
    assert [dataclasses.astuple(params) for params in layers.values()] == [
        dataclasses.astuple(params) for params in before.values()
    ]


@given(LAYERS)
def test_groups_hold_every_layer_once_among_its_equals(layers: dict[str, PerLayerParameters]) -> None:
    groups = group_by_hyperparameters(layers)
    assert sorted(name for names in groups.values() for name in names) == sorted(layers)
    for params, names in groups.items():
        assert all(layers[name] == params for name in names)
        assert params.has_same_all_params
        assert params.has_same_window_lefts
        assert names == groups[layers[names[0]]]
    assert list(groups) == list(dict.fromkeys(layers.values())), "in the order of first appearance"


def test_no_layers_have_nothing_in_common() -> None:
    with pytest.raises(BatchError, match=r"per_layer_params=\{\} must have at least one layer"):
        infer_global_hyperparameters({})
    assert group_by_hyperparameters({}) == {}


def test_the_verdicts_do_not_take_part_in_equality() -> None:
    alike = PerLayerParameters(-1, None, 0.125, has_same_window_lefts=True, has_same_all_params=False)
    assert alike == PerLayerParameters(-1, None, 0.125)
    assert hash(alike) == hash(PerLayerParameters(-1, None, 0.125))
    assert alike != PerLayerParameters(-1, None, 0.125, has_sinks=True)


def test_a_spec_says_what_its_impl_asks() -> None:
    impl_cls = TorchBackend.get_impl_cls()
    full = LayerSpec(num_heads=2, num_kv_heads=1, head_size=64, logits_soft_cap=30.0)
    sliding = full.replace(sliding_window=128, logits_soft_cap=None, has_sinks=True)
    layers = {
        "a": SimpleNamespace(impl=impl_cls.from_spec(full, backend=TorchBackend, layer_name="a")),
        "b": SimpleNamespace(
            impl=impl_cls.from_spec(
                sliding, backend=TorchBackend, layer_name="b", tensors=LayerTensors(sinks=torch.zeros(2))
            )
        ),
        "c": SimpleNamespace(impl=impl_cls.from_spec(full, backend=TorchBackend, layer_name="c")),
    }
    assert get_per_layer_parameters(layers, ["b", "a"], impl_cls) == {
        "b": PerLayerParameters(127, None, 0.125, has_sinks=True),
        "a": PerLayerParameters(-1, 30.0, 0.125),
    }
    assert list(get_per_layer_parameters(layers, ["b", "a"], impl_cls)) == ["b", "a"]


def test_a_ported_impl_is_read_by_the_attributes_that_authors_know() -> None:
    layers = {
        "full": SimpleNamespace(impl=PortedImpl(0.5)),
        "none": SimpleNamespace(impl=PortedImpl(0.5, sliding_window=None, logits_soft_cap=None, sinks=None)),
        "all": SimpleNamespace(
            impl=PortedImpl(0.5, sliding_window=(63, 0), logits_soft_cap=20.0, sinks=torch.zeros(2))
        ),
    }
    assert get_per_layer_parameters(layers, layers, PortedImpl) == {
        "full": PerLayerParameters(-1, None, 0.5),
        "none": PerLayerParameters(-1, None, 0.5),
        "all": PerLayerParameters(63, 20.0, 0.5, has_sinks=True),
    }


def test_a_layer_of_another_class_is_refused() -> None:
    layers = {"a": SimpleNamespace(impl=PortedImpl(0.5))}
    with pytest.raises(BatchError, match=r"layers\['a'\].impl='PortedImpl' must be a dict, as the plan's is"):
        get_per_layer_parameters(layers, ["a"], dict)


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(BatchError, match="layer_names='b' is not among the 1 layers given"):
        get_per_layer_parameters({"a": SimpleNamespace(impl=PortedImpl(0.5))}, ["b"], PortedImpl)
