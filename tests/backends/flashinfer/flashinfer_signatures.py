"""Signatures of FlashInfer's wrappers as versions of it have them: kind, name, and whether there is a default."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

_FOLDER = Path(__file__).parent / "signatures"

VERSIONS = tuple(
    sorted((path.stem for path in _FOLDER.glob("*.json")), key=lambda v: [*map(int, v.split("."))])
)
"""The versions recorded, oldest first."""


def recorded(version: str) -> dict[str, dict[str, inspect.Signature]]:
    """By wrapper and method, without `self`."""
    text = (_FOLDER / f"{version}.json").read_text(encoding="utf-8")
    return {
        wrapper: {method: _signature(parameters) for method, parameters in methods.items()}
        for wrapper, methods in json.loads(text).items()
    }


def _signature(parameters: list[tuple[str, str, bool]]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                name, inspect._ParameterKind[kind], default=None if has_default else inspect.Parameter.empty
            )
            for kind, name, has_default in parameters
        ]
    )
