"""The attention layers of well-known models, as data: no configuration is read, and transformers is not imported."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from attnplug.core.spec import LayerSpec

_FILE = "example_models.json"


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleModel:
    """A model of `examples/models`.

    Args:
        name: of its file, such as "gpt-oss-20b".
        model_type: of its configuration.
        layers: the spec of each layer by name, with the KV dtype "auto".
    """

    name: str
    model_type: str
    layers: Mapping[str, LayerSpec]

    @property
    def path(self) -> str:
        """The configuration in a clone of attnplug."""
        return f"examples/models/{self.name}.json"

    def with_kv_cache_dtype(self, kv_cache_dtype: str) -> dict[str, LayerSpec]:
        """The layers with another KV dtype; those that receive keys and values with the call keep "auto"."""
        changed = {
            spec: spec if spec.direct_kv else spec.replace(kv_cache_dtype=kv_cache_dtype)
            for spec in dict.fromkeys(self.layers.values())
        }
        return {name: changed[spec] for name, spec in self.layers.items()}


@functools.cache
def example_models() -> tuple[ExampleModel, ...]:
    """Every model of `examples/models`, by name."""
    data = json.loads(resources.files("attnplug.matrix").joinpath(_FILE).read_text(encoding="utf-8"))
    return tuple(_model(each) for each in data)


def models_text(models: Iterable[ExampleModel]) -> str:
    """The file that `example_models` reads: each spec once, a line for each model."""
    return "[\n" + ",\n".join(json.dumps(_to_dict(model)) for model in models) + "\n]\n"


def _to_dict(model: ExampleModel) -> dict[str, Any]:
    specs = list(dict.fromkeys(model.layers.values()))
    return {
        "name": model.name,
        "model_type": model.model_type,
        "specs": [spec.to_dict() for spec in specs],
        "layers": {name: specs.index(spec) for name, spec in model.layers.items()},
    }


def _model(data: Mapping[str, Any]) -> ExampleModel:
    specs = [LayerSpec.from_dict(each) for each in data["specs"]]
    layers = {name: specs[number] for name, number in data["layers"].items()}
    return ExampleModel(data["name"], data["model_type"], layers)
