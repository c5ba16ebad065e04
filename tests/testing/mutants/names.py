"""Backends that read a layer's name: its number, its start or its end. Variants of TORCH."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from mutants.parts import Respecified
from mutants.table import Table

table = Table("names")
impl = table.on(TorchImpl)
KNOWN = "a layer known by a part of its name"


def number(name: str) -> int:
    """The first number of a name; 0 without one."""
    found = re.search(r"\d+", name)
    return int(found[0]) if found else 0


class Keeps(Respecified):
    """Keeps the scale, window and cap of layers by a key of their names, for all layers of the process."""

    kept: ClassVar[dict[Hashable, dict[str, Any]]]

    def key(self) -> Hashable:
        raise NotImplementedError

    def fields(self, *given: Any) -> dict[str, Any]:
        own = {name: getattr(self.spec, name) for name in ("scale", "window", "logits_soft_cap")}
        return self.kept.setdefault((self.key(), self.spec.replace(**PLAIN)), own)


PLAIN: dict[str, Any] = {"scale": 1.0, "window": (-1, -1), "logits_soft_cap": None}


def kept(check: str, says: str, **rows: Callable[[str], Hashable]) -> None:
    """Rows by the part of a name."""
    for name, part in rows.items():
        key = {"key": lambda self, _part=part: _part(self.layer_name), "kept": {}}
        table.row(name, check, says, impl=type(name, (Keeps,), key))


# fmt: off
kept("layers/names", KNOWN,
    by_number=number,
    by_last_number=lambda name: number(" ".join(reversed(re.findall(r"\d+", name)))),
    by_last_part=lambda name: name.rpartition(".")[2],
    by_last_two_parts=lambda name: tuple(name.split(".")[-2:]),
    by_start=lambda name: name[:14],
    by_length=len)
# fmt: on


def parses(**rows: Callable[[str], int]) -> None:
    """Rows that parse a name when the layer is made."""
    for name, parse in rows.items():

        def process(right: Any, self: Any, dtype: Any, _parse: Any = parse) -> None:
            right(dtype)
            self.index = _parse(self.layer_name)

        says = "in process_weights_after_loading of"
        impl.process_weights_after_loading("layers/names", says, **{name: process})


parses(
    parses_the_last_part=lambda name: int(name.rpartition(".")[2]),
    parses_the_third_part=lambda name: int(name.split(".")[2]),
    parses_after_layers=lambda name: int(name.partition("layers.")[2].partition(".")[0]),
)


class AlternatesWindows(Respecified):
    """Every other layer is taken for one without a window."""

    def fields(self, *given: Any) -> dict[str, Any]:
        return {"window": (-1, -1)} if number(self.layer_name) % 2 and self.spec.causal else {}


table.add(f"alternates_windows | layers/names | {KNOWN}", impl=AlternatesWindows)


class FirstByName(TorchMetadataBuilder):
    """Takes the chunks of the first of the layers in the order of their numbers, which it finds by name."""

    def build(self, *given: Any, **asked: Any) -> Any:
        self.config.layers[f"model.layers.{number(self.layer_names[0])}.self_attn.attn"]
        return super().build(*given, **asked)


table.add("finds_layers_by_number | layers/names | raised KeyError: 'model.layers.", builder=FirstByName)
