"""Finds transformers' own family and class for a configuration that names remote code, which is never run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from attnplug.integrations.model_spec import family_note


def with_known_types(data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`data` with the family of its `architectures` for a model_type that transformers lacks, and a note of each.

    Configurations inside it are changed likewise. Without a family a name stays as it is.
    """
    notes: list[str] = []

    def known(part: Mapping[str, Any], where: str) -> dict[str, Any]:
        changed = {
            name: known(value, f"{where}{name}.")
            if isinstance(value, dict) and "model_type" in value
            else value
            for name, value in part.items()
        }
        name, classes = part.get("model_type"), part.get("architectures")
        if not isinstance(name, str) or name in CONFIG_MAPPING or not isinstance(classes, list):
            return changed
        for cls in classes:
            if isinstance(cls, str) and (family := _family_of(cls)):
                notes.append(
                    family_note(f"{where}model_type {name!r}", transformers.__version__, family, cls)
                )
                return {**changed, "model_type": family}
        return changed

    return known(data, ""), tuple(notes)


def _family_of(class_name: str) -> str | None:
    """The model type of transformers' class of that name."""
    for name, table in vars(modeling_auto).items():
        if name.endswith("MAPPING_NAMES") and isinstance(table, Mapping):
            for family, classes in table.items():
                if class_name in ((classes,) if isinstance(classes, str) else classes):
                    return str(family)
    return None


def class_like(name: str, classes: Iterable[type]) -> type | None:
    """The class of the same name but for case and underscores, such as PhimoeForCausalLM for PhiMoEForCausalLM."""
    return next((cls for cls in classes if _plain(cls.__name__) == _plain(name)), None)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
