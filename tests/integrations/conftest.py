"""Reading small configurations, where transformers is there to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from attnplug.core.spec import LayerSpec  # noqa: E402
from attnplug.integrations.transformers import ModelSpec, read_config  # noqa: E402

MODELS = Path(__file__).parents[2] / "examples" / "models"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture
def no_grad() -> Iterator[None]:
    """No step of the test records gradients."""
    import torch

    with torch.no_grad():
        yield


@pytest.fixture
def example() -> Callable[..., ModelSpec]:
    """Reads one of examples/models by name."""
    return lambda name, **options: read_config(MODELS / f"{name}.json", **options)


@pytest.fixture
def small() -> Callable[..., Any]:
    """Makes a small configuration of the class of that name: 4 layers, 4 heads of 16, 2 KV heads."""

    def make(name: str, **fields: Any) -> Any:
        cls = getattr(transformers, f"{name}Config")
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        stored = {cls.attribute_map.get(field, field): value for field, value in sizes.items()}
        known = {field: value for field, value in stored.items() if field in cls.__dataclass_fields__}
        return cls(**{**known, **fields})

    return make


@pytest.fixture
def layers(small: Callable[..., Any]) -> Callable[..., list[LayerSpec]]:
    """The specs, in order, of a small configuration."""
    return lambda name, **fields: list(read_config(small(name, **fields)).layers.values())
