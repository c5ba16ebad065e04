"""The data of the page "Which backend for my model?": every model by GPU and KV dtype, answered by the selector.

The attention layers of well-known models are data: no configuration is read, and transformers is not imported.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from attnplug.core.device import gpu_models
from attnplug.core.spec import LayerSpec
from attnplug.matrix.pasted import pasted_data
from attnplug.matrix.which_backend import GPU, KV_CHOICES, BackendAnswer, LayerGroup, answers_for
from attnplug.matrix.words import colours, letters
from attnplug.registry.devices import resolve_device

if TYPE_CHECKING:
    from attnplug.registry.registry import Registry
    from attnplug.registry.selection.decision import Decision

COMMON_GPUS = ("A100", "H100", "H200", "B200", "L40S", "L4", "T4", "RTX 4090", "RTX 5090", "MI300X")
"""The GPUs that the page lists first."""
START = ("gpt-oss-20b", "h100", "auto")
"""The model, the GPU and the KV dtype that the page opens with."""

_VOWEL_LETTERS = "AEFHILMNORSX"
"""Capital letters whose names begin with a vowel, as in "an H100"."""


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
        """The layers with another KV dtype; those without pages of keys and values keep "auto"."""
        changed = {
            spec: spec.replace(kv_cache_dtype=kv_cache_dtype) if spec.has_pages else spec
            for spec in dict.fromkeys(self.layers.values())
        }
        return {name: changed[spec] for name, spec in self.layers.items()}


@functools.cache
def example_models() -> tuple[ExampleModel, ...]:
    """Every model of `examples/models`, by name."""
    data = json.loads(
        resources.files("attnplug.matrix").joinpath("example_models.json").read_text(encoding="utf-8")
    )
    models = []
    for each in data:
        specs = [LayerSpec.from_dict(spec) for spec in each["specs"]]
        layers = {name: specs[number] for name, number in each["layers"].items()}
        models.append(ExampleModel(each["name"], each["model_type"], layers))
    return tuple(models)


def models_text(models: Iterable[ExampleModel]) -> str:
    """The file that `example_models` reads: each spec once, a line for each model."""
    lines = []
    for model in models:
        specs = list(dict.fromkeys(model.layers.values()))
        layers = {name: specs.index(spec) for name, spec in model.layers.items()}
        data = {"name": model.name, "model_type": model.model_type, "specs": [s.to_dict() for s in specs]}
        lines.append(json.dumps({**data, "layers": layers}))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def model_data(registry: Registry, *, with_pasted: bool = False) -> dict[str, Any]:
    """The data as plain JSON values.

    `answers` has a list for each model, in it a list for each device, in it an index into `texts` for each KV
    dtype. The page puts the name of the GPU in place of "{gpu}" in the sentence and the command of a text. A kind of
    layers has indices into `tables`: the candidates of a decision, with indices into `reasons`. `with_pasted` adds what
    the page needs to answer for a config.json that its reader pastes: 8,000 more decisions, which take seconds.

    Raises:
        PolicyError, PluginError: settings of the environment that no backend can follow.
    """
    gpus = _gpus()
    devices = list(dict.fromkeys(gpu["device"] for gpu in gpus))
    numbers = _TextNumbers()
    answers = [
        [
            [numbers.text(model, answer, choice) for choice, answer in by_choice.items()]
            for by_choice in (answers_for(registry, model, resolve_device(device)) for device in devices)
        ]
        for model in example_models()
    ]
    pasted = None
    if with_pasted:
        pasted = pasted_data(registry, list(map(resolve_device, devices)), numbers.text, ExampleModel)
    return {
        "start": list(START),
        "common": len(COMMON_GPUS) + 1,
        "letters": letters(registry.backends()),
        "colours": {name: each for name, (each, _) in colours(registry.backends()).items()},
        "requires": {
            name: [each if isinstance(each, str) else each[0] for each in backend.requires]
            for name, backend in registry.backends().items()
        },
        "models": [_layers(model) for model in example_models()],
        "gpus": gpus,
        "devices": devices,
        "dtypes": [
            {"key": name, "words": f"{name} (any)" if len(meant) > 1 else name}
            for name, meant in KV_CHOICES.items()
        ],
        "answers": answers,
        "pasted": pasted,
        "texts": list(map(json.loads, numbers.texts)),
        "tables": list(map(json.loads, numbers.tables)),
        "reasons": list(numbers.reasons),
    }


class _TextNumbers:
    """Numbers texts, tables and reasons in order of first use, equal ones once."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.tables: dict[str, int] = {}
        self.reasons: dict[str, int] = {}

    def text(
        self, model: ExampleModel, answer: BackendAnswer, choice: str, marks: Mapping[str, str] = {}
    ) -> int:
        """The number of the text of an answer, with the words of `marks` replaced."""
        outcome = answer.outcome
        stored = any(not spec.direct_kv for spec in model.layers.values())
        dtype = f" --kv-cache-dtype {outcome.kv_cache_dtype}" if stored and choice != "auto" else ""
        data = {
            "sentence": answer.sentence,
            "command": f"attnplug select {model.path} --device {GPU}{dtype} --assume-installed all",
            "dtype": outcome.kv_cache_dtype,
            "served": outcome.is_served,
            "bytes": outcome.bytes_per_token,
            "notes": list(outcome.notes),
            "kinds": [self._kind(kind) for kind in outcome.kinds],
        }
        said = json.dumps(data)
        for word, mark in marks.items():
            said = said.replace(word, mark)
        return self.texts.setdefault(said, len(self.texts))

    def _kind(self, kind: LayerGroup) -> dict[str, Any]:
        return {
            "words": kind.words,
            "backends": list(kind.joint.members.values()) if kind.joint else [],
            "reference": kind.reference,
            "tables": [self._table(each) for each in kind.alone or (kind.joint,)],
        }

    def _table(self, decision: Decision) -> int:
        rows = [
            [
                each.name,
                "chosen" if each is decision.chosen else "accepted" if each.accepted else "refused",
                [self.reasons.setdefault(str(reason), len(self.reasons)) for reason in each.reasons],
            ]
            for each in decision.candidates
        ]
        data = {"phase": str(decision.phase or ""), "rows": rows}
        return self.tables.setdefault(json.dumps(data), len(self.tables))


def _gpus() -> list[dict[str, str]]:
    """Every GPU that attnplug knows, and the CPU; the common ones first."""
    gpus = []
    for model in gpu_models():
        said = f"{'an' if model.name[0] in _VOWEL_LETTERS else 'a'} {model.name}"
        device = str(resolve_device(model.name))
        gpus.append(
            {"key": _key(model.name), "name": model.name, "said": said, "device": device}
            | {"arch": model.arch}
        )
    gpus.append({"key": "cpu", "name": "CPU", "said": "a CPU", "device": "cpu", "arch": ""})
    common = [*map(_key, COMMON_GPUS), "cpu"]
    return sorted(gpus, key=lambda gpu: common.index(gpu["key"]) if gpu["key"] in common else len(common))


def _key(name: str) -> str:
    return name.lower().replace(" ", "")


def _layers(model: ExampleModel) -> dict[str, Any]:
    specs = list(dict.fromkeys(model.layers.values()))
    return {"name": model.name, "layers": [specs.index(spec) for spec in model.layers.values()]}
