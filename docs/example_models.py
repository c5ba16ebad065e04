"""Writes the layers of the example models that the page of the matrix asks about: `python docs/example_models.py`."""

from __future__ import annotations

from pathlib import Path

from attnplug.integrations.transformers import read_config
from attnplug.matrix.model_page import ExampleModel, models_text

ROOT = Path(__file__).parents[1]
FILE = ROOT / "attnplug" / "matrix" / "example_models.json"


def read_models() -> list[ExampleModel]:
    """The models of examples/models, read from their configurations."""
    models = []
    for path in sorted((ROOT / "examples" / "models").glob("*.json")):
        spec = read_config(path)
        models.append(ExampleModel(path.stem, spec.model_type, spec.layers))
    return models


if __name__ == "__main__":
    FILE.write_text(models_text(read_models()), encoding="utf-8")
