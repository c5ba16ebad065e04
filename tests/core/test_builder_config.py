"""BuilderConfig: the little that a builder must know of the engine."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from attnplug.core import BuilderConfig
from attnplug.errors import SpecError

LEAST = {
    "num_speculative_tokens": 0,
    "decode_context_parallel_size": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 1,
}


def test_a_builder_can_be_told_nothing() -> None:
    config = BuilderConfig()
    assert (config.num_speculative_tokens, config.decode_context_parallel_size) == (0, 1)
    assert (config.max_model_len, config.cudagraph_batch_sizes) == (None, ())
    assert dict(config.layers) == {}


@pytest.mark.parametrize("field", LEAST)
def test_a_count_may_be_at_its_limit_and_not_below(field: str) -> None:
    least = LEAST[field]
    assert getattr(BuilderConfig(**{field: least}), field) == least
    with pytest.raises(SpecError, match=f"{field}={least - 1}:? must be an integer of at least {least}"):
        BuilderConfig(**{field: least - 1})


@pytest.mark.parametrize("field", LEAST)
@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_a_count_is_an_integer(field: str, value: object) -> None:
    if field == "max_model_len" and value is None:
        assert BuilderConfig(max_model_len=None).max_model_len is None
        return
    with pytest.raises(SpecError, match=f"{field}="):
        BuilderConfig(**{field: value})


@pytest.mark.parametrize("sizes", [(0,), (1, -1), (1, 2.0), (True,)])
def test_graph_sizes_are_integers_of_at_least_one(sizes: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="cudagraph_batch_sizes="):
        BuilderConfig(cudagraph_batch_sizes=sizes)


def test_values_become_exact() -> None:
    config = BuilderConfig(max_num_seqs=np.int64(8), cudagraph_batch_sizes=[1, 2, np.int32(4)])  # type: ignore[arg-type]
    assert config.cudagraph_batch_sizes == (1, 2, 4)
    assert [type(size) for size in (config.max_num_seqs, *config.cudagraph_batch_sizes)] == [int] * 4


def test_a_configuration_cannot_be_changed_and_survives_a_pickle() -> None:
    config = BuilderConfig(num_speculative_tokens=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_speculative_tokens = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
