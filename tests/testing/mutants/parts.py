"""Parts of TORCH with a hook, which a row of the table replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from mutants.table import Table

__all__ = ["Altered", "Around", "Call", "Respecified", "acts"]


@dataclasses.dataclass
class Call:
    """The arguments of `attend`, except the layer."""

    query: torch.Tensor
    key: Any
    value: Any
    kv_cache: Any
    metadata: TorchMetadata
    output: torch.Tensor
    more: dict[str, Any]

    @property
    def rows(self) -> torch.Tensor:
        """The output of the batch's own tokens."""
        return self.output[: self.metadata.num_actual_tokens]

    @property
    def lse(self) -> torch.Tensor:
        """The LSE that is asked for; no rows if none is."""
        found = self.more.get("output_lse")
        return self.output.new_empty(0, self.output.shape[1], dtype=torch.float32) if found is None else found


class Around(TorchImpl):
    """Runs hooks before and after TORCH's attend."""

    def attend(self, layer: Any, *args: Any, **more: Any) -> Any:
        call = Call(*args, more=more)
        self.before(call)
        given = (call.query, call.key, call.value, call.kv_cache, call.metadata, call.output)
        super().attend(layer, *given, **call.more)
        self.after(call)
        return self.returned(call)

    def before(self, call: Call) -> None:
        """Does nothing."""

    def after(self, call: Call) -> None:
        """Does nothing."""

    def returned(self, call: Call) -> Any:
        return call.output


class Respecified(TorchImpl):
    """Attends for a layer with other fields, which may depend on the call's arguments."""

    def fields(self, *given: Any) -> dict[str, Any]:
        raise NotImplementedError

    def attend(self, *given: Any, **asked: Any) -> Any:
        own, self.spec = self.spec, self.spec.replace(**self.fields(*given))
        try:
            return super().attend(*given, **asked)
        finally:
            self.spec = own


class Altered(TorchMetadataBuilder):
    """Changes the metadata of TORCH's builder."""

    fast = False
    """Whether the current build is a fast one."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        self.fast = fast_build
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self.altered(made, common_attn_metadata)

    def altered(self, made: Any, common: Any) -> Any:
        raise NotImplementedError


def acts(table: Table, base: type, method: str) -> Callable[..., None]:
    """Rows that act after a method of an impl or builder: of words of the check of settings, and acts by name."""
    changes = table.method(base, method)

    def rows(says: str, check: str = "state/settings-kept-decode", **named: Callable[[], object]) -> None:
        for name, act in named.items():

            def then_act(right: Any, self: Any, *given: Any, _act: Any = act, **asked: Any) -> Any:
                found = right(*given, **asked)
                _act()
                return found

            changes(check, says, **{name: then_act})

    return rows
