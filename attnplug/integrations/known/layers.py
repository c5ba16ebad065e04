"""One attention layer as a rule describes it, before the ranks divide its heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attnplug.core.mla import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.integrations.known.fields import Check
from attnplug.integrations.model_spec import Client
from attnplug.integrations.reader.rank_spec import make_spec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention layer, with the heads of all ranks.

    `called_scale` is the scale that transformers passes with the call, if the model applies another part of it
    to its queries. `is_paged` says whether an engine keeps the keys and values in pages. `head_size_v` is None
    if it equals `head_size`. With `mla`, `head_size` and `head_size_v` are those of expanded keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    head_size_v: int | None = None
    called_scale: float | None = None
    attn_type: AttentionType = AttentionType.DECODER
    window: tuple[int, int] = (-1, 0)
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    mla: MLADims | None = None
    sparse: SparseSpec | None = None
    is_paged: bool = True

    def spec(self, path: str, ranks: int, dtype: str, kv_cache_dtype: str, client: Client) -> LayerSpec:
        """The spec of one rank. ModelConfigError if the ranks do not divide the heads."""
        paged = self.is_paged and client is Client.ENGINE
        fields = ("attn_type", "window", "chunk_size", "logits_soft_cap", "has_sinks", "has_alibi", "sparse")
        sizes: dict[str, Any] = {"head_size": self.head_size}
        kv_heads, scale = self.num_kv_heads, self.scale
        if client is Client.TRANSFORMERS:
            scale = self.scale if self.called_scale is None else self.called_scale
        elif self.mla is not None:
            sizes = {"head_size": self.mla.kv_lora_rank + self.mla.qk_rope_head_dim, "mla": self.mla}
            kv_heads = 1
        if "mla" not in sizes and self.head_size_v is not None:
            sizes["head_size_v"] = self.head_size_v
        return make_spec(
            path,
            num_heads=self.num_heads,
            num_kv_heads=kv_heads,
            ranks=ranks,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype if paged else "auto",
            causal=self.window[1] == 0,
            scale=scale,
            direct_kv=not paged,
            **sizes,
            **{name: getattr(self, name) for name in fields},
        )


Layers = Iterable[tuple[str, Attention]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model type whose layers follow from its configuration by a rule.

    Args:
        classes: the model classes in `architectures`, and what they put before a layer's path; the first one
            is transformers' class for a configuration that names none.
        fields: every field that the rule understands, and the values that it understands.
        required: fields without which the full reader refuses the file.
        defaults: transformers' values of absent fields that the rule reads.
        read: the layers of checked fields, in the order that the model runs them; None for a combination of
            values that the rule does not know.
        clients: the programs whose layers the rule knows.
    """

    classes: Mapping[str, str]
    fields: Mapping[str, Check]
    defaults: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Layers | None]
    required: tuple[str, ...] = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    clients: tuple[Client, ...] = tuple(Client)
