"""Groups of layers that share a plan: equal hyperparameters, sizes, dtypes and options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from attnplug.backends.flashinfer.modules import Module
from attnplug.backends.flashinfer.options import Options
from attnplug.core.device import Device
from attnplug.core.errors import PolicyError
from attnplug.core.hyperparameters import PerLayerParameters, get_per_layer_parameters
from attnplug.core.spec import LayerSpec
from attnplug.ops.storage import STORAGE_DTYPES

# FlashInfer's decode kernel without tensor cores has these groups in every version; 0.7 has more.
_GROUPED_HEADS = (1, 2, 3, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True)
class PlanGroup:
    """Everything that a FlashInfer plan fixes, except the step and the page size.

    Args:
        parameters: window, cap, scale and sinks.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_size: of queries, keys and values.
        dtype: of queries and outputs.
        kv_dtype: of the pages.
        chunk_size: of chunked local attention, which is planned over pieces of requests.
        causal: whether the layers are.
        options: the layers'.
    """

    parameters: PerLayerParameters
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    chunk_size: int | None
    causal: bool
    options: Options
    # The hash does not count for equality: it is derived from the other fields.
    _hash: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Computed once: each layer of each step looks its group up.
        fields = (getattr(self, field.name) for field in dataclasses.fields(self) if field.init)
        object.__setattr__(self, "_hash", hash(tuple(fields)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        asked = self.parameters
        parts = [f"{self.num_heads}/{self.num_kv_heads}/{self.head_size}"]
        parts += [f"window {asked.window_left + 1}"] if asked.window_left >= 0 else []
        parts += [f"chunk {self.chunk_size}"] if self.chunk_size else []
        parts += [f"soft cap {asked.logits_soft_cap:g}"] if asked.logits_soft_cap is not None else []
        parts += ["sinks"] if asked.has_sinks else []
        return ", ".join([*parts, f"scale {asked.sm_scale:.4g}"])

    def module(self, phase: str, device: Device) -> Module:
        """The module that runs a phase, "decode" or "prefill", of these layers.

        Raises:
            PolicyError: an option asks for fa3, or for decodes without tensor cores, and it cannot be used.
        """
        template = self._prefill_template(device) if phase == "prefill" else self._decode_template()
        return Module(
            template,
            self.dtype,
            self.kv_dtype,
            self.head_size,
            self.parameters.window_left >= 0,
            self.parameters.logits_soft_cap is not None,
            self.parameters.has_sinks,
        )

    def _decode_template(self) -> str:
        if self.options.tensor_cores:
            return "fa2"
        grouped = self.num_heads // self.num_kv_heads
        why = None
        if self.parameters.has_sinks:
            why = "has no kernel with sinks"
        elif grouped not in _GROUPED_HEADS:
            limit = ", ".join(map(str, _GROUPED_HEADS))
            why = f"has kernels for {limit} query heads of a KV head, and these layers have {grouped}"
        if why is not None:
            raise PolicyError("options['tensor_cores']", False, why, "leave it True")
        return "cuda-cores"

    def _prefill_template(self, device: Device) -> str:
        asked = self.options.prefill_backend
        capability = device.capability
        why = None
        # Without a capability, such as on a CPU, fa3 is not refused, but "auto" does not choose it.
        if capability is not None and capability[0] != 9:
            why = f"needs compute capability 9.x, and the device has {capability[0]}.{capability[1]}"
        elif self.kv_dtype.itemsize == 1:
            # Pages of one byte therefore prefill on fa2.
            why = "has no fp8 KV with 16-bit queries"
        if asked == "fa3" and why is not None:
            raise PolicyError("options['prefill_backend']", asked, why, "set it to 'auto' or 'fa2'")
        if asked == "auto":
            return "fa3" if why is None and capability is not None else "fa2"
        return asked


@functools.lru_cache(maxsize=1024)
def key_of(spec: LayerSpec, parameters: PerLayerParameters, options: Options) -> PlanGroup:
    """A layer's group; equal layers get the same object, which makes look-ups fast."""
    return PlanGroup(
        dataclasses.replace(parameters, has_same_window_lefts=None, has_same_all_params=None),
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_size,
        STORAGE_DTYPES[spec.dtype],
        STORAGE_DTYPES[spec.resolved_kv_cache_dtype],
        spec.chunk_size,
        spec.causal,
        options,
    )


def groups_of(
    layers: Mapping[str, Any], layer_names: Iterable[str], impl_cls: type[Any]
) -> dict[PlanGroup, list[str]]:
    """The groups of the named layers, in the order of first appearance.

    Raises:
        BatchError: a layer that `layers` lacks, or whose impl is of another class.
    """
    groups: dict[PlanGroup, list[str]] = {}
    for name in get_per_layer_parameters(layers, layer_names, impl_cls):
        groups.setdefault(layers[name].impl.plan_group, []).append(name)
    return groups
