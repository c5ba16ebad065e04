"""Correct backends that do something unusual around the computation: variants of TORCH."""

from __future__ import annotations

import decimal
import logging
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from catching import variant

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import AttentionBackend, Device, LayerSpec

__all__ = ["UNUSUAL"]


class OwnLogger(TorchImpl):
    """Sets the level of its own package's logger."""

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        logging.getLogger("acme.attention").setLevel(logging.ERROR)
        return super().attend(*given, **asked)


class RestoresSettings(TorchImpl):
    """Changes settings of the process for the time of a call."""

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        with (
            torch.no_grad(),
            np.errstate(all="ignore"),
            decimal.localcontext() as context,
            warnings.catch_warnings(),
        ):
            context.prec = 5
            return super().attend(*given, **asked)


class KeepsQuery(TorchImpl):
    """Keeps the queries of the last step, and no others."""

    last: Any = None

    def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
        self.last = given[1]
        return super().attend(*given, **asked)


class NoUpdate(TorchMetadataBuilder):
    """Builds each KV group by itself."""

    supports_update_block_table: ClassVar[bool] = False

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        raise TypeError("each group is built by itself")


class KeyOfSpecs(TorchMetadataBuilder):
    """Shares builds of equal layers only."""

    @property
    def build_key(self) -> tuple[LayerSpec, ...]:
        return tuple(self.config.layers[name].impl.spec for name in self.layer_names)


class InheritsKey(TorchMetadataBuilder):
    """Overrides how metadata is made and declares no key, so that no groups share a build."""

    def build(self, *given: Any, **asked: Any) -> Any:
        return super().build(*given, **asked)


class Threshold(TorchMetadataBuilder):
    """Wants short queries first, and needs no order."""

    reorder_batch_threshold = 4


def refusing(why: str, when: Callable[[LayerSpec], bool]) -> Any:
    def supports_combination(cls: Any, spec: LayerSpec, device: Device) -> str | None:
        return why if when(spec) else None

    return supports_combination


def same_views(cls: Any, cache: torch.Tensor, spec: LayerSpec) -> tuple[torch.Tensor, ...]:
    """Views that are made from strides."""
    parts = TorchBackend.split_kv(cache, spec)
    return tuple(part.as_strided(part.shape, part.stride(), part.storage_offset()) for part in parts)


UNUSUAL: dict[str, type[AttentionBackend]] = {
    "own_logger": variant("OWN_LOGGER", impl=OwnLogger),
    "restores_settings": variant("RESTORES_SETTINGS", impl=RestoresSettings),
    "keeps_query": variant("KEEPS_QUERY", impl=KeepsQuery),
    "no_update": variant("NO_UPDATE", builder=NoUpdate),
    "key_of_specs": variant("KEY_OF_SPECS", builder=KeyOfSpecs),
    "inherits_key": variant("INHERITS_KEY", builder=InheritsKey),
    "threshold": variant("THRESHOLD", builder=Threshold),
    "no_odd_groups": variant(
        "NO_ODD_GROUPS",
        supports_combination=refusing(
            "odd groups of queries are not served",
            lambda spec: spec.num_heads // spec.num_kv_heads in (3, 5, 7, 9),
        ),
    ),
    "no_windows_with_sinks": variant(
        "NO_WINDOWS_WITH_SINKS",
        supports_combination=refusing(
            "windows with sinks are not served", lambda spec: spec.is_windowed and spec.has_sinks
        ),
    ),
    "no_fp8_of_bfloat16": variant(
        "NO_FP8_OF_BFLOAT16",
        supports_combination=refusing(
            "bfloat16 over fp8 is not served",
            lambda spec: spec.dtype == "bfloat16" and spec.has_quantized_kv_cache,
        ),
    ),
    "few_heads": variant(
        "FEW_HEADS",
        supports_combination=refusing("at most 32 heads are served", lambda spec: spec.num_heads > 32),
    ),
    "views_by_strides": variant("VIEWS_BY_STRIDES", split_kv=same_views),
}
