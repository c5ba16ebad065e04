"""The one table of what a layer can ask for beyond sizes and dtypes: each Feature is a row of it.

Validation, the composite backend, the conformance kit, the compatibility matrix and the command line read
their rows here. A new feature is a new row, a numeric case in the kit's oracle, and the kernels that serve it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from attnplug.core.kv_format import kv_format, kv_formats
from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.core.state.dims import StateDims

if TYPE_CHECKING:
    from attnplug.core.spec import LayerSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureRow:
    """One row: how a layer asks for a feature, and how attnplug names it to people and programs.

    Args:
        field: the LayerSpec field that asks. A field that LayerSpec does not declare becomes a flag of it.
        when: whether a spec asks; default: the field is set.
        values: values of the field that ask, the plainest first; the kit and the matrix try them.
        fields: every field of a layer that asks, by its head size and its block size (None: not given);
            default the first of `values` alone.
        code: code of the reason that refuses it; default "feature.<name>".
        refusal: the sentence of that reason; default "<name> not supported".
        kinds: the class attribute of AttentionBackend that lists the kinds served, of a field whose value has a
            `kind` or is a tuple of kinds. The reasons then name the value: "sparse token_topk 2048 not supported".
        declared_by: the method of AttentionBackend that says whether it is served; default: `features` says.
        only: the sentence that refuses layers which do not ask, for features that a backend serves alone.
        besides: the class attribute of AttentionBackend that says whether such a backend serves other layers too.
        label: its name in tables; default its name with spaces.
        shown: what `attnplug select` says of a spec that asks; default `label`.
        option: the option of `attnplug explain` that asks.
        help: help of that option; None where the option is not this row's alone.
        metavar, parse: of an option that takes several values: their names with commas, optional ones in brackets,
            and the field's value that they give.
        words: how many of these values, in front, are words; the others are integers.
        per_request: each request can be served alone, so the backends of a composite can share a step.
        unpaged: the layer has no pages of K and V, and so no block size, layout or storage dtype of them.
    """

    field: str
    when: Callable[[LayerSpec], bool] | None = None
    values: tuple[Any, ...] = (True,)
    fields: Callable[[int, int | None], Mapping[str, Any]] | None = None
    code: str | None = None
    refusal: str | None = None
    kinds: str | None = None
    declared_by: str | None = None
    only: str | None = None
    besides: str | None = None
    label: str | None = None
    shown: Callable[[LayerSpec], str] | None = None
    option: str
    help: str | None = None
    metavar: str | None = None
    parse: Callable[..., Any] | None = None
    words: int = 0
    per_request: bool = False
    unpaged: bool = False


def _whole_pages(block_size: int | None) -> int:
    # Kernels that read chunks as requests of their own begin each at a page.
    page = block_size or 1
    return -(-24 // page) * page


def _latent(head_size: int, rope: int = 64) -> dict[str, Any]:
    """Latent attention whose latents have `head_size` elements, or 128 where these hold no more than positions."""
    size = head_size if head_size > rope else 2 * rope
    dims = MLADims(
        q_lora_rank=1536,
        kv_lora_rank=size - rope,
        qk_nope_head_dim=128,
        qk_rope_head_dim=rope,
        v_head_dim=128,
    )
    return {"mla": dims, "num_kv_heads": 1, "head_size": size}


# Strict is the default, and Python 3.11.2 forgets it: unknown flags became none.
class Feature(enum.Flag, boundary=enum.STRICT):
    """One flag for each thing that changes the numbers or the way a backend is called; `ask` is its row.

    A spec gives its flags with `required_features()`. A backend refuses each flag that its `features` lack,
    so every plugin refuses a flag that is added here after the plugin was written.
    """

    ask: FeatureRow

    def __new__(cls, row: FeatureRow | int) -> Self:
        """A member from its row, or the union of members that has the value `row`."""
        self = object.__new__(cls)
        # Numbered in order, so that a new row needs no number. Files store names, not numbers.
        self._value_ = row if isinstance(row, int) else 1 << len(cls.__members__)
        if isinstance(row, FeatureRow):
            self.ask = row
        return self

    SLIDING_WINDOW = FeatureRow(
        field="window",
        when=lambda spec: spec.is_windowed,
        values=((6, 0), (40, 40), (149, 0), (5, 11), (0, 0), (15, -1), (-1, 7), (150, 3)),
        shown=lambda spec: (
            "window {},{}".format(*spec.window)
            if spec.sliding_window is None
            else f"sliding {spec.sliding_window}"
        ),
        option="--window",
        help="Keys seen on each side; -1 means no limit.",
        metavar="LEFT,RIGHT",
        parse=lambda left, right: (left, right),
        per_request=True,
    )
    """Only keys within `window` of the query's position are seen."""
    CHUNKED_LOCAL = FeatureRow(
        field="chunk_size",
        values=(24, 129, 64, 16),
        fields=lambda head_size, block_size: {"chunk_size": _whole_pages(block_size)},
        shown=lambda spec: f"chunk {spec.chunk_size}",
        option="--chunk-size",
        help="Chunked local attention.",
        per_request=True,
    )
    """Only keys of the query's own chunk are seen."""
    SOFT_CAP = FeatureRow(
        field="logits_soft_cap",
        values=(3.0, 1.7, 30.5, 0.9),
        shown=lambda spec: f"soft cap {spec.logits_soft_cap:g}",
        option="--soft-cap",
        help="Soft cap on the logits.",
        per_request=True,
    )
    """Logits become `c * tanh(logits / c)`."""
    SINKS = FeatureRow(
        field="has_sinks",
        code="sink",
        declared_by="supports_sink",
        option="--sinks",
        help="Attention sinks.",
        per_request=True,
    )
    """One learned logit per head enters the softmax denominator."""
    ALIBI = FeatureRow(
        field="has_alibi", label="ALiBi", option="--alibi", help="ALiBi slopes.", per_request=True
    )
    """A per-head slope times the distance is subtracted from the logits."""
    MLA = FeatureRow(
        field="mla",
        fields=lambda head_size, block_size: _latent(head_size),
        code="mla",
        refusal="MLA not supported",
        declared_by="is_mla",
        only="non-MLA not supported",
        label="MLA",
        option="--mla",
        help="MLA dimensions; Q may be 0 for none.",
        metavar="Q,KV,NOPE,ROPE,V",
        # The command line gives integers only, so 0 means None.
        parse=lambda q, kv, nope, rope, v: MLADims(
            q_lora_rank=q or None, kv_lora_rank=kv, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v
        ),
    )
    """Multi-head latent attention: one latent vector per token is cached."""
    SPARSE = FeatureRow(
        field="sparse",
        # The first is crossed by short contexts; the second equals dense attention for them.
        values=(
            SparseSpec("token_topk", 24),
            SparseSpec("token_topk", 1024),
            SparseSpec("block", 3, 16),
            SparseSpec("token_topk", 1),
        ),
        code="sparse",
        refusal="sparse attention not supported",
        kinds="supported_sparse_kinds",
        declared_by="is_sparse",
        only="non-sparse attention not supported",
        besides="serves_dense",
        shown=lambda spec: f"sparse {spec.sparse}",
        option="--sparse",
        help="Keys that an indexer picks, such as token_topk,2048 or block,16,64.",
        metavar="KIND,TOPK[,BLOCK]",
        parse=SparseSpec,
        words=1,
        per_request=True,
    )
    """Only keys picked by an indexer are seen."""
    MM_PREFIX = FeatureRow(
        field="mm_prefix",
        code="mm_prefix",
        refusal="multimodal prefix spans not supported",
        declared_by="supports_mm_prefix",
        label="mm prefix",
        option="--mm-prefix",
        help="Tokens of an image see each other in both directions.",
        per_request=True,
    )
    """Tokens of a multimodal span see their whole span, also keys that the causal mask, window or chunk hides."""
    LSE = FeatureRow(
        field="needs_lse",
        label="LSE",
        option="--lse",
        help="Return the log-sum-exp of each row too.",
        per_request=True,
    )
    """The log-sum-exp of each row is returned, so that partial results can be merged."""
    HEAD_SIZE_V = FeatureRow(
        field="head_size_v",
        # With MLA the value is always a part of the latent, and a state has two sizes, so no flag is needed for them.
        when=lambda spec: spec.head_size_v != spec.head_size and spec.mla is None and spec.state is None,
        values=(64, 128),
        fields=lambda head_size, block_size: {"head_size_v": 64 if 64 < head_size <= 128 else 128},
        label="value head size",
        shown=lambda spec: f"head size v {spec.head_size_v}",
        option="--head-size-v",
        help="Elements per value head, if different.",
        per_request=True,
    )
    """Values have another head size than queries and keys."""
    NON_CAUSAL = FeatureRow(
        field="causal",
        when=lambda spec: not spec.causal,
        values=(False,),
        label="non-causal",
        option="--causal",
        per_request=True,
    )
    """Queries see keys after their own position."""
    DIRECT_KV = FeatureRow(
        field="direct_kv",
        label="direct KV",
        option="--direct-kv",
        help="K and V are given with each call, without a paged cache.",
        unpaged=True,
    )
    """K and V come with the call instead of from pages."""
    FP8_KV = FeatureRow(
        field="kv_cache_dtype",
        # The resolved name is read, so that "auto" has the same answer as full names.
        when=lambda spec: kv_format(spec.resolved_kv_cache_dtype).feature == "fp8_kv",
        values=tuple(row.name for row in kv_formats() if row.is_common and row.feature == "fp8_kv"),
        label="fp8 KV",
        shown=lambda spec: f"{spec.kv_cache_dtype} KV",
        option="--kv-cache-dtype",
        per_request=True,
    )
    """The KV cache holds 8-bit floats with scales."""
    HEAD_SCALES = FeatureRow(
        field="head_scales",
        fields=lambda head_size, block_size: {"kv_cache_dtype": "fp8", "head_scales": True},
        label="head scales",
        option="--head-scales",
        help="Each KV head of an fp8 cache has scales of its own; needs --kv-cache-dtype.",
        per_request=True,
    )
    """Each KV head of a cache of 8-bit floats has scales of its own."""
    CROSS = FeatureRow(
        field="attn_type",
        when=lambda spec: spec.attn_type == "encoder_decoder",
        values=("encoder_decoder",),
        code="attn_type",
        declared_by="supports_attn_type",
        label="cross attention",
        shown=lambda spec: "cross",
        option="--attn-type",
        per_request=True,
    )
    """Queries of a decoder attend the keys of an encoder."""
    ENCODER = FeatureRow(
        field="attn_type",
        when=lambda spec: spec.attn_type in ("encoder_only", "encoder"),
        values=("encoder_only", "encoder"),
        fields=lambda head_size, block_size: {"attn_type": "encoder_only", "direct_kv": True},
        code="attn_type",
        declared_by="supports_attn_type",
        shown=lambda spec: str(spec.attn_type).replace("_", "-"),
        option="--attn-type",
        unpaged=True,
    )
    """Encoder layers, without a KV cache that grows."""

    INVARIANCE = FeatureRow(
        field="invariance",
        values=(("batch",), ("rows",), ("heads",), ("batch", "rows", "heads")),
        code="invariance",
        kinds="supported_invariances",
        shown=lambda spec: f"invariance {'+'.join(spec.invariance)}",
        option="--invariance",
        help="On what the bits of a row do not depend: batch, rows, heads.",
        metavar="WORD[,WORD[,WORD]]",
        parse=lambda *words: words,
        words=3,
        per_request=True,
    )
    """The bits of a row do not depend on how a step is made."""
    STATE = FeatureRow(
        field="state",
        values=(
            StateDims(rule="delta", decay="head"),
            StateDims(rule="delta", decay="row"),
            StateDims(rule="linear", decay="head"),
            StateDims(rule="linear", decay="row"),
            StateDims(rule="conv", width=4),
        ),
        kinds="supported_state_rules",
        only="attention layers not supported",
        shown=lambda spec: str(spec.kinds[0]) if spec.state is None else f"state {spec.state}",
        option="--state",
        help="The rule of a state layer: delta,head; delta,row; linear,head; linear,row; or conv,4.",
        metavar="RULE,DECAY[,DRAFTS]",
        parse=StateDims.parse,
        words=3,
        unpaged=True,
    )
    """A state of fixed size is kept for each request, in place of K and V of its tokens."""
    STATE_DRAFTS = FeatureRow(
        field="state",
        when=lambda spec: spec.state is not None and spec.state.drafts > 0,
        values=(StateDims(rule="delta", decay="head", drafts=3), StateDims(rule="conv", width=4, drafts=1)),
        label="state drafts",
        option="--state",
        unpaged=True,
    )
    """A step stores a state after each draft token, so that rejected ones can be forgotten."""
    STATE_CHECKPOINTS = FeatureRow(
        field="block_size",
        when=lambda spec: spec.state is not None and spec.block_size is not None,
        values=(64, 16),
        fields=lambda head_size, block_size: {
            "state": StateDims(rule="delta", decay="head"),
            "block_size": block_size or 64,
        },
        label="state checkpoints",
        option="--block-size",
        unpaged=True,
    )
    """States on borders of blocks are kept, for requests with the same prefix."""

    def names(self) -> tuple[str, ...]:
        """The lower-case names of the flags set, in the order of this class."""
        return tuple(flag.name.lower() for flag in self if flag.name)

    # The rest is for single flags.

    def is_asked_by(self, spec: LayerSpec) -> bool:
        """Whether a layer asks for this feature."""
        when = self.ask.when
        return bool(getattr(spec, self.ask.field)) if when is None else when(spec)

    def fields(self, head_size: int = 64, block_size: int | None = None) -> dict[str, Any]:
        """Arguments of a LayerSpec that ask for this feature, for a layer of these sizes."""
        row = self.ask
        if row.fields is not None:
            return dict(row.fields(head_size, block_size))
        return {row.field: row.values[0]}

    @property
    def code(self) -> str:
        """The code of the reason that refuses it."""
        return self.ask.code or f"feature.{self.names()[0]}"

    @property
    def refusal(self) -> str:
        """The sentence of the reason that refuses it."""
        return self.ask.refusal or f"{self.names()[0]} not supported"

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.ask.label or self.names()[0].replace("_", " ")

    def shown(self, spec: LayerSpec) -> str:
        """The words for a layer that asks for it: "sliding 1024"."""
        return self.label if self.ask.shown is None else self.ask.shown(spec)


FEATURES = tuple(Feature)
"""All features in order: Python looks through the names of an enumeration each time that one is walked."""
