"""Layers that reuse an earlier layer's KV: only the tokens whose logits are wanted attend there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch

from attnplug.core.arguments import checked, integer, listed, subclass_of
from attnplug.core.backend import AttentionBackend, subclass_attention_backend
from attnplug.core.batch.host import IntArray, host_view, optional_rows, query_spans, to_device
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

_M = TypeVar("_M", bound=AttentionMetadata)


def _prefix(field: str, value: object) -> object:
    if not isinstance(value, str) or not (value == "" or value.isidentifier()):
        raise BatchError(field, value, "must be text that can begin the name of a class")
    return value


def _fields(field: str, value: object) -> list[Any]:
    found = listed(field, value, "(name, type) or (name, type, default)")
    for index, each in enumerate(found):
        is_pair = isinstance(each, (tuple, list)) and len(each) in (2, 3) and isinstance(each[0], str)
        if not is_pair or not each[0].isidentifier():
            raise BatchError(f"{field}[{index}]", each, "must be (name, type) or (name, type, default)")
    return found


@runtime_checkable
class KVSharingFastPrefillMetadata(Protocol):
    """A backend's metadata that also says which rows of the batch it is about."""

    logits_indices_padded: torch.Tensor | None
    num_logits_indices: int | None


def make_kv_sharing_fast_prefill_common_attn_metadata(
    common_attn_metadata: CommonAttentionMetadata,
) -> CommonAttentionMetadata:
    """The batch of only those tokens whose logits are wanted, lengths unchanged; possibly none of a request.

    Its queries are the rows `logits_indices_padded[:num_logits_indices]`. The wanted tokens of
    a request are its last ones, such as its last token and the drafts before it. A batch of single-token requests is returned as it is.

    Raises:
        BatchError: indices that are missing, outside the batch, or nowhere on the host: the batch
            needs `logits_indices_cpu` where `logits_indices_padded` is on a device.
    """
    _, lengths = query_spans(common_attn_metadata)
    if lengths.max(initial=0) <= 1:
        return common_attn_metadata
    return of_wanted_tokens(common_attn_metadata)


def of_wanted_tokens(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """As `make_kv_sharing_fast_prefill_common_attn_metadata`, for single-token requests too."""
    starts, _ = query_spans(common)
    indices = np.sort(_host_indices(common))
    if indices.size and not 0 <= indices[0] <= indices[-1] < starts[-1]:
        found = (int(indices[0]), int(indices[-1]))
        raise BatchError(
            "logits_indices_padded", found, f"must be in 0 .. {int(starts[-1]) - 1}, the batch's tokens"
        )
    wanted = indices.searchsorted(starts).astype(np.int32)
    # An indexer may fill the selection after this, and the wanted rows of it are no view.
    common = common.changed(selection=None)
    return dataclasses.replace(
        common,
        query_start_loc=to_device(wanted, common.query_start_loc.device),
        query_start_loc_cpu=torch.from_numpy(wanted),
        num_actual_tokens=indices.size,
        max_query_len=int((wanted[1:] - wanted[:-1]).max(initial=0)),
        _num_computed_tokens_cpu=None,
        **optional_rows(common, slice(None), indices.astype(np.int64)),
    )


def _host_indices(common: CommonAttentionMetadata) -> IntArray:
    padded, count = common.logits_indices_padded, common.num_logits_indices
    if padded is None or count is None:
        field = "logits_indices_padded" if padded is None else "num_logits_indices"
        raise BatchError(field, None, "is required where requests have more than one token")
    if not isinstance(padded, torch.Tensor) or padded.ndim != 1:
        found = tuple(padded.shape) if isinstance(padded, torch.Tensor) else padded
        raise BatchError("logits_indices_padded", found, "must be a tensor of one dimension")
    if not 0 <= integer("num_logits_indices", count) <= padded.shape[0]:
        raise BatchError("num_logits_indices", count, f"must be in 0 .. {padded.shape[0]}, the indices given")
    on_host = common.logits_indices_cpu
    return host_view("logits_indices_padded", padded if on_host is None else on_host)[:count]


@checked(name_prefix=_prefix, metadata_cls=subclass_of(AttentionMetadata), fields=_fields)
def subclass_attention_metadata(
    name_prefix: str,
    metadata_cls: type[_M],
    fields: Sequence[tuple[str, Any] | tuple[str, Any, Any]],
) -> type[_M]:
    """A dataclass named `name_prefix` + the metadata's class name, with fields added.

    Args:
        name_prefix: begins the new name.
        metadata_cls: a dataclass, frozen or not, or a plain class without a constructor.
        fields: (name, type) or (name, type, default), as `dataclasses.make_dataclass` takes them.
    """
    params = getattr(metadata_cls, "__dataclass_params__", None)
    made = dataclasses.make_dataclass(
        name_prefix + metadata_cls.__name__,
        fields,
        bases=(metadata_cls,),
        frozen=params is not None and params.frozen,
        eq=params is not None and params.eq,
        namespace={"__module__": metadata_cls.__module__, "__doc__": metadata_cls.__doc__},
    )
    return cast("type[_M]", made)


@checked(prefix=_prefix, underlying_attn_backend=subclass_of(AttentionBackend))
def create_fast_prefill_custom_backend(
    prefix: str, underlying_attn_backend: type[AttentionBackend]
) -> type[AttentionBackend]:
    """A subclass, named `prefix` + the backend's, that builds for only the tokens whose logits are wanted.

    Its metadata is the backend's own with `logits_indices_padded` and `num_logits_indices` beside:
    a `KVSharingFastPrefillMetadata`. A batch without `num_logits_indices` wants all tokens.
    """
    builder_cls = underlying_attn_backend.get_builder_cls()
    # One new class for each class of metadata, instead of one in each step.
    classes: dict[type[AttentionMetadata], type[AttentionMetadata]] = {}

    def build(
        self: AttentionMetadataBuilder[Any],
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        wanted = common_attn_metadata
        if wanted.num_logits_indices not in (None, wanted.num_actual_tokens):
            wanted = of_wanted_tokens(wanted)
        metadata = builder_cls.build(self, common_prefix_len, wanted, fast_build)
        cls = type(metadata)
        if cls not in classes:
            classes[cls] = _fast_prefill_class(cls)
        return _as_fast_prefill(classes[cls], metadata, common_attn_metadata)

    made = type(prefix + builder_cls.__name__, (builder_cls,), {"build": build, "__module__": __name__})
    return subclass_attention_backend(prefix, underlying_attn_backend, made)


def _fast_prefill_class(metadata_cls: type[AttentionMetadata]) -> type[AttentionMetadata]:
    fields = [("logits_indices_padded", Any, None), ("num_logits_indices", Any, None)]
    return subclass_attention_metadata("KVSharingFastPrefill", metadata_cls, fields)


def _as_fast_prefill(
    cls: type[AttentionMetadata], metadata: AttentionMetadata, common: CommonAttentionMetadata
) -> AttentionMetadata:
    # Not through the constructor: it may compute, and takes not every attribute.
    made = cls.__new__(cls)
    slots = {name for base in type(metadata).__mro__ for name in getattr(base, "__slots__", ())}
    values = {name: getattr(metadata, name) for name in slots if hasattr(metadata, name)}
    values |= getattr(metadata, "__dict__", {})
    values["logits_indices_padded"] = common.logits_indices_padded
    values["num_logits_indices"] = common.num_logits_indices
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
