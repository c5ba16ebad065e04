"""The data of the page "Which backend for my model?": every model by GPU and KV dtype, answered by the selector."""

from __future__ import annotations

import collections
import json
from typing import TYPE_CHECKING, Any

from attnplug.core.device import gpu_models
from attnplug.matrix.example_models import ExampleModel, example_models
from attnplug.matrix.which_backend import GPU, KV_CHOICES, BackendAnswer, LayerGroup, answers_for
from attnplug.matrix.words import letters
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


def model_data(registry: Registry) -> dict[str, Any]:
    """The data as plain JSON values.

    `answers` has a list for each model, in it a list for each device, in it an index into `texts` for each KV
    dtype. The page puts the name of the GPU in place of "{gpu}" in the sentence and the command of a text. A kind of
    layers has indices into `tables`: the candidates of a decision, with indices into `reasons`.

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
    return {
        "start": list(START),
        "common": len(COMMON_GPUS) + 1,
        "letters": letters(registry.backends()),
        "models": [_model(model) for model in example_models()],
        "gpus": gpus,
        "devices": devices,
        "dtypes": [
            {"key": name, "words": f"{name} (any)" if len(meant) > 1 else name}
            for name, meant in KV_CHOICES.items()
        ],
        "answers": answers,
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
        self._served: collections.Counter[str] = collections.Counter()

    def backends(self) -> list[str]:
        """The backends that serve layers, those that serve most first."""
        return [name for name, _ in self._served.most_common()]

    def text(self, model: ExampleModel, answer: BackendAnswer, choice: str) -> int:
        """The number of the text of an answer."""
        outcome = answer.outcome
        self._served.update(name for kind in outcome.kinds for name in kind.backends)
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
        return self.texts.setdefault(json.dumps(data), len(self.texts))

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
    gpus = [_gpu(model.name, str(resolve_device(model.name)), model.arch) for model in gpu_models()]
    gpus.append({"key": "cpu", "name": "CPU", "said": "a CPU", "device": "cpu", "arch": ""})
    common = [*map(_key, COMMON_GPUS), "cpu"]
    return sorted(gpus, key=lambda gpu: common.index(gpu["key"]) if gpu["key"] in common else len(common))


def _gpu(name: str, device: str, arch: str) -> dict[str, str]:
    article = "an" if name[0] in _VOWEL_LETTERS else "a"
    return {"key": _key(name), "name": name, "said": f"{article} {name}", "device": device, "arch": arch}


def _key(name: str) -> str:
    return name.lower().replace(" ", "")


def _model(model: ExampleModel) -> dict[str, Any]:
    specs = list(dict.fromkeys(model.layers.values()))
    return {"name": model.name, "layers": [specs.index(spec) for spec in model.layers.values()]}
