"""The engines that `attnplug conformance --engine` knows, without an import of any."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Sequence

from attnplug.core.errors import PolicyError

ALL = "all"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine.

    Args:
        name: as the command takes it.
        module: of this package; its ENGINE lists the checks.
        package: the Python package that must be installed; None if attnplug alone suffices.
        remedy: how to install it.
    """

    name: str
    module: str
    package: str | None = None
    remedy: str = ""

    @property
    def checks_of(self) -> str:
        """The function of a Target that lists the checks, as `load_suite` takes it."""
        return f"attnplug.engines.{self.module}:ENGINE.checks"

    @property
    def absent(self) -> str | None:
        """Why the engine cannot run here; None if it can."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed; {self.remedy}"


ENGINES = {
    row.name: row
    for row in (
        EngineRow("flash-attn", "flash_attn"),
        EngineRow("transformers", "transformers", "transformers", "pip install 'transformers>=5.15'"),
        EngineRow("vllm", "vllm", "vllm", "pip install vllm"),
        EngineRow("sglang", "sglang", "sglang", "pip install sglang"),
    )
}


def read_engines(texts: Sequence[str]) -> list[EngineRow]:
    """The engines that texts such as "vllm,flash-attn" or "all" name, each once, in the order of the table.

    PolicyError: an unknown name.
    """
    names = [name.strip().lower() for text in texts for name in text.split(",")]
    for name in names:
        if name not in (*ENGINES, ALL):
            near = difflib.get_close_matches(name, ENGINES, 1)
            remedy = f"did you mean {near[0]}?" if near else None
            raise PolicyError("--engine", name, f"must be of {', '.join(ENGINES)}, or {ALL}", remedy)
    return [row for row in ENGINES.values() if row.name in names or ALL in names]
