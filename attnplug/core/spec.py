"""The needs of one attention layer, as a frozen, hashable, torch-free value."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Never

from attnplug.core.checks import (
    MOST_TOKENS,
    check_flag,
    check_member,
    check_positive,
    check_size,
    check_window,
)
from attnplug.core.dtypes import dtype_name, is_quantized_kv_cache, kv_cache_dtype_name, stored_dtype_name
from attnplug.core.errors import BatchError, SpecError
from attnplug.core.features import FEATURES, Feature
from attnplug.core.invariance import check_invariance
from attnplug.core.kv_format import kv_format
from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec, check_sparse
from attnplug.core.state.dims import StateDims, check_state

KINDS: tuple[str, ...] = ("full", "sliding", "chunked", "cross", "encoder", "mla", "state", "conv")
"""The kinds of layer that a backend rule can name; see LayerSpec.kinds."""


class Phase(enum.StrEnum):
    """The two kinds of work in a step. A phase argument of None means both."""

    DECODE = "decode"
    """Query lengths up to the builder's reorder threshold."""
    PREFILL = "prefill"
    """Everything else, extends included."""


class AttentionType(enum.StrEnum):
    """The tokens that attend, and the tokens that they attend to."""

    DECODER = "decoder"
    """Self-attention of a decoder."""
    ENCODER = "encoder"
    """Self-attention of the encoder in an encoder-decoder model."""
    ENCODER_ONLY = "encoder_only"
    """Self-attention of an encoder-only model."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross-attention: decoder queries, encoder keys."""


def _added_flags(declared: Mapping[str, object]) -> list[str]:
    return [flag.ask.field for flag in Feature if flag.ask.field not in declared]


# The constructor is written by hand: it takes sliding_window, which is not a field, and fills in defaults.
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, init=False)
class LayerSpec:
    """One attention layer's needs, per rank.

    The constructor checks every value. Attributes hold exact values, and defaults are filled in (`scale`,
    `head_size_v`, `causal`).

    Args:
        num_heads: query heads on this rank; a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads on this rank; 1 with `mla`.
        head_size: elements per query and key head; with `mla` kv_lora_rank + qk_rope_head_dim.
        head_size_v: elements per value head; default `head_size`, with `mla` kv_lora_rank.
        dtype: "float16", "bfloat16" or "float32", or the `torch.dtype` of that name.
        kv_cache_dtype: "auto" (= `dtype`), "fp8", "fp8_e4m3", "fp8_e5m2", ...; an open string.
        block_size: tokens per KV page; None lets the backend choose.
        attn_type: an AttentionType or its value.
        causal: None is True for a decoder and False otherwise.
        scale: softmax scale; default `head_size ** -0.5`, with `mla` (nope + rope) ** -0.5.
        window: (left, right): how many keys before and after the query's own position are seen, its own
            not counted; -1 means no limit; causal makes right 0.
        sliding_window: W as model configurations count it, W keys including the query's own, for
            causal layers: the same as `window=(W - 1, 0)`.
        chunk_size: c, for chunked local attention: position p sees keys floor(p / c) * c .. p.
        logits_soft_cap: c > 0: logits become c * tanh(logits / c).
        has_sinks: one learned logit per head enters the softmax denominator only.
        has_alibi: `-slope * abs(key_pos - query_pos)` is added to the logits.
        mla: dimensions of multi-head latent attention. A call then passes queries and outputs of `query_size` and
            `output_size`, and as its key the latent; `head_size` and `head_size_v` are those of absorbed attention.
        head_scales: each KV head of a cache of 8-bit floats has a `k_scale` and a `v_scale` of its own, and not the
            layer one of each.
        sparse: only keys that an indexer picks are seen: their kind and number. They come with each step, as
            `CommonAttentionMetadata.selection`.
        state: the layer keeps a state for each request, and no K and V of tokens: the rule that changes it.
            `num_heads` are then value heads, `num_kv_heads` key heads, `head_size` and `head_size_v` the sizes of a
            state. `kv_cache_dtype` is its storage dtype; "auto" is float32, and `dtype` for a convolution.
            `block_size` is the distance of checkpoints in tokens; None keeps none.
        mm_prefix: tokens of a multimodal span also see all of their span, in both directions and past the
            window or chunk.
        direct_kv: K and V come with the call, not from pages: its calls get no KV cache, also those of an encoder.
        needs_lse: the engine merges partial results and needs the log-sum-exp.
        invariance: on what the bits of a row do not depend, of INVARIANCES: "batch", the other requests of a step;
            "rows", which of its request's tokens are in the step; "heads", the number of heads on the rank.

    The order is fixed: scale, soft cap, ALiBi, mask, sinks.

    Raises:
        SpecError: an invalid value; it names the field, the value and the limit.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    kv_cache_dtype: str
    block_size: int | None
    attn_type: AttentionType
    causal: bool
    scale: float
    window: tuple[int, int]
    chunk_size: int | None
    logits_soft_cap: float | None
    has_sinks: bool
    has_alibi: bool
    mla: MLADims | None
    sparse: SparseSpec | None
    state: StateDims | None
    mm_prefix: bool
    direct_kv: bool
    needs_lse: bool
    head_scales: bool
    invariance: tuple[str, ...]
    # A row of Feature whose field is none of the above adds a flag. No type checker knows it, so a field that
    # stays is declared above and gets an argument below.
    __annotations__ |= dict.fromkeys(_added_flags(__annotations__), "bool")
    # The names of filled-in defaults: replace and pickle leave them to the constructor again.
    _derived: frozenset[str] = dataclasses.field(init=False, repr=False, compare=False)
    # A spec is part of every key in the cache of decisions, so its hash is computed only once.
    _hash: int = dataclasses.field(init=False, repr=False, compare=False)

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int | None = None,
        dtype: object = "bfloat16",
        kv_cache_dtype: object = "auto",
        block_size: int | None = None,
        attn_type: AttentionType | str = AttentionType.DECODER,
        causal: bool | None = None,
        scale: float | None = None,
        window: Sequence[int] = (-1, -1),
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        logits_soft_cap: float | None = None,
        has_sinks: bool = False,
        has_alibi: bool = False,
        mla: MLADims | None = None,
        sparse: SparseSpec | None = None,
        state: StateDims | None = None,
        mm_prefix: bool = False,
        direct_kv: bool = False,
        needs_lse: bool = False,
        head_scales: bool = False,
        invariance: Sequence[str] = (),
        **added: Never,
    ) -> None:
        kind = check_member(AttentionType, "attn_type", attn_type)
        decoder = kind is AttentionType.DECODER
        is_causal = decoder if causal is None else check_flag("causal", causal)
        if is_causal and kind is AttentionType.ENCODER_DECODER:
            limit = "must be False for cross attention: encoder keys have no order to it"
            raise SpecError("causal", causal, limit)
        heads, kv_heads = check_size("num_heads", num_heads), check_size("num_kv_heads", num_kv_heads)
        size = check_size("head_size", head_size)
        if heads % kv_heads:
            raise SpecError("num_heads", heads, f"must be a multiple of num_kv_heads={kv_heads}")
        size_v = scaled = size
        if mla is not None:
            _check_mla(mla, kind, kv_heads, size, head_size_v)
            size_v, scaled = mla.kv_lora_rank, mla.query_size
        chunk = None if chunk_size is None else check_size("chunk_size", chunk_size, most=MOST_TOKENS)
        reach = check_window(window, sliding_window, is_causal)
        if chunk is not None and not is_causal:
            raise SpecError("chunk_size", chunk, "needs a causal layer: a chunk ends at the query")
        if chunk is not None and reach != (-1, 0):
            limit = f"cannot be given with window={reach}"
            raise SpecError("chunk_size", chunk, limit, "give one of the two")
        cap = logits_soft_cap
        values: dict[str, Any] = {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_size": size,
            "head_size_v": size_v if head_size_v is None else check_size("head_size_v", head_size_v),
            "dtype": dtype_name(dtype),
            "kv_cache_dtype": kv_cache_dtype_name(kv_cache_dtype),
            "block_size": None if block_size is None else check_size("block_size", block_size),
            "attn_type": kind,
            "causal": is_causal,
            "scale": float(scaled**-0.5) if scale is None else check_positive("scale", scale),
            "window": reach,
            "chunk_size": chunk,
            "logits_soft_cap": cap
            if cap is None
            else check_positive("logits_soft_cap", cap, "None means no cap"),
            "has_sinks": check_flag("has_sinks", has_sinks),
            "has_alibi": check_flag("has_alibi", has_alibi),
            "mla": mla,
            "sparse": check_sparse(sparse),
            "state": state,
            "mm_prefix": check_flag("mm_prefix", mm_prefix),
            "direct_kv": check_flag("direct_kv", direct_kv),
            "needs_lse": check_flag("needs_lse", needs_lse),
            "head_scales": check_flag("head_scales", head_scales),
            "invariance": check_invariance(invariance),
        }
        check_state(state, values)
        if head_scales:
            _check_head_scales(values)
        # Fields after the named ones are flags that rows of Feature added. The last two are private.
        for name in tuple(LayerSpec.__slots__)[len(values) : -2]:
            values[name] = check_flag(name, added.pop(name, False))
        if added:
            raise TypeError(f"LayerSpec got an unexpected keyword argument {next(iter(added))!r}")
        given = {"head_size_v": head_size_v, "scale": scale, "causal": causal}
        # Computed before _derived is added: a default that was given equals one that was filled in.
        values["_hash"] = hash(tuple(values.values()))
        values["_derived"] = frozenset(name for name, value in given.items() if value is None)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, tuple[()]]:
        # The stored hash is not pickled, because Python hashes text differently in each process.
        return functools.partial(type(self), **self._given()), ()

    def _given(self) -> dict[str, Any]:
        names = (f.name for f in dataclasses.fields(self) if f.init)
        return {name: getattr(self, name) for name in names if name not in self._derived}

    def replace(self, **changes: Any) -> LayerSpec:
        """A copy with some arguments changed; filled-in defaults follow the change.

        `spec.replace(head_size=64)` has the scale and value head size of a spec made with 64, unless they
        were given. (`dataclasses.replace` copies every attribute unchanged.)
        """
        given = self._given()
        if self.causal or changes.get("sliding_window") is not None:
            del given["window"]  # its right side may be causality's, not the caller's
        if self.causal and "window" not in changes:
            given["sliding_window"] = self.sliding_window
        return type(self)(**{**given, **changes})

    # copy.replace of Python 3.13 calls this name.
    __replace__ = replace

    @property
    def derived(self) -> frozenset[str]:
        """The fields whose values are filled-in defaults, which follow a `replace`; not compared by `==`."""
        return self._derived

    @property
    def sliding_window(self) -> int | None:
        """W as model configurations count it (itself included), or None without a causal window."""
        left, _ = self.window
        return left + 1 if self.causal and left >= 0 else None

    @property
    def resolved_kv_cache_dtype(self) -> str:
        """The storage dtype that `kv_cache_dtype` means: "auto" is `dtype`, "fp8" is "fp8_e4m3".

        For a state "auto" is float32, because each token rounds it again; a convolution only stores its inputs.
        """
        if self.state is not None and self.state.rule != "conv" and self.kv_cache_dtype == "auto":
            return "float32"
        return stored_dtype_name(self.kv_cache_dtype, self.dtype)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that describe this layer, most specific first, of KINDS.

        The attention type comes first ("mla", "cross", "encoder"), then the visible keys ("sliding",
        "chunked"). A layer without any of them is "full". A state layer is "state", or "conv".
        """
        if self.state is not None:
            return ("conv",) if self.state.rule == "conv" else ("state",)
        kinds = []
        if self.mla is not None:
            kinds.append("mla")
        if self.attn_type is AttentionType.ENCODER_DECODER:
            kinds.append("cross")
        elif self.attn_type is not AttentionType.DECODER:
            kinds.append("encoder")
        if self.is_windowed:
            kinds.append("sliding")
        if self.chunk_size is not None:
            kinds.append("chunked")
        return tuple(kinds) or ("full",)

    @property
    def query_size(self) -> int:
        """Elements of a query head that a call passes: `head_size`, with `mla` nope + rope."""
        return self.head_size if self.mla is None else self.mla.query_size

    @property
    def output_size(self) -> int:
        """Elements of an output head that a call returns: `head_size_v`, with `mla` v_head_dim."""
        return self.head_size_v if self.mla is None else self.mla.v_head_dim

    def expanded(self) -> LayerSpec:
        """The layer that prefills a layer with `mla`: K and V come with the call, expanded for each head.

        Its keys have nope + rope elements and its values v_head_dim. It is not causal, because queries attend the
        chunks of computed tokens whole; a batch of new tokens asks for causal=True. Its LSE merges the parts.

        Raises:
            SpecError: the layer has no `mla`, or has chunks, which only causal layers can have.
        """
        if self.mla is None:
            raise SpecError("mla", None, "is required: other layers have nothing to expand")
        fields: dict[str, Any] = {"window": self.window if self.is_windowed else (-1, -1)}
        fields |= {"mla": None, "kv_cache_dtype": "auto", "block_size": None, "causal": False}
        fields |= {"num_kv_heads": self.num_heads, "head_size": self.query_size, "scale": self.scale}
        fields |= {"head_size_v": self.output_size, "direct_kv": True, "needs_lse": True}
        return self.replace(**fields)

    @property
    def is_encoder(self) -> bool:
        """Whether it is self-attention of an encoder, which computes all its tokens at once."""
        return self.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)

    @property
    def has_pages(self) -> bool:
        """Whether K and V of its tokens are stored in pages: not with direct K and V, nor for a layer with a state."""
        return not self.direct_kv and self.state is None

    @property
    def is_windowed(self) -> bool:
        """Whether the window hides any key that causality does not."""
        left, right = self.window
        return left >= 0 or (right >= 0 and not self.causal)

    def causal_in(self, step: bool | None) -> bool:
        """Whether the layer is causal in a step whose batch says `step`: None is as the layer says.

        True narrows a decoder layer whose queries see later tokens. An encoder sees all its tokens in each step.

        Raises:
            BatchError: False for a causal layer; True for an encoder or for cross attention.
        """
        if step is None or step is self.causal:
            return self.causal
        if not isinstance(step, bool):
            raise BatchError("causal", step, "must be a bool, or None: as the layers say")
        remedy = "leave causal=None: each layer is then as its own spec says"
        if self.causal:
            raise BatchError("causal", step, "cannot widen a causal layer", remedy)
        if self.attn_type is not AttentionType.DECODER:
            raise BatchError("causal", step, f"cannot narrow a layer of attn_type={self.attn_type}", remedy)
        return True

    def required_features(self) -> Feature:
        """The features that this layer asks for."""
        return _required_features(self)

    @property
    def has_quantized_kv_cache(self) -> bool:
        """Whether the KV cache stores values that differ from the computed ones by a scale."""
        return is_quantized_kv_cache(self.resolved_kv_cache_dtype)

    @property
    def has_kv_scales(self) -> bool:
        """Whether `k_scale` and `v_scale` of the layer are scales of its stored keys and values."""
        return kv_format(self.resolved_kv_cache_dtype).layer_scales

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with every field, and with the names of filled-in defaults as `derived`."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        data["attn_type"] = str(self.attn_type)
        data["window"], data["invariance"] = list(self.window), list(self.invariance)
        for name in ("mla", "sparse", "state"):
            value = data[name]
            data[name] = None if value is None else dataclasses.asdict(value)
        data["derived"] = sorted(self.derived)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerSpec:
        """The spec that `to_dict` wrote; fields left out take their defaults.

        Values that `derived` names are filled in again, so that they follow a `replace`.

        Raises:
            SpecError: an unknown field, a value without meaning, or a derived one that is not the default.
        """
        if not isinstance(data, Mapping):
            raise SpecError("data", data, "must be a mapping of the fields of a LayerSpec")
        known = [f.name for f in dataclasses.fields(cls) if f.init] + ["sliding_window", "derived"]
        for name in data:
            if name not in known:
                limit = f"is not a field of a LayerSpec; fields are {', '.join(known)}"
                raise SpecError(name, data[name], limit)
        for name in ("num_heads", "num_kv_heads", "head_size"):
            if name not in data:
                raise SpecError(name, None, "is required")
        given = {**data, "mla": _mla_of(data.get("mla"))}
        sparse = data.get("sparse")
        given["sparse"] = SparseSpec.from_dict(sparse) if isinstance(sparse, Mapping) else sparse
        state = data.get("state")
        given["state"] = StateDims.from_dict(state) if isinstance(state, Mapping) else state
        # Files of earlier versions do not say which values were filled in.
        derived = given.pop("derived", ())
        if not isinstance(derived, list | tuple) or not all(name in _DEFAULTS for name in derived):
            raise SpecError("derived", derived, f"must be a list of names among {', '.join(_DEFAULTS)}")
        spec = cls(**given)
        if not derived:
            return spec
        made = cls(**{name: value for name, value in given.items() if name not in derived})
        for name in derived:
            default = getattr(made, name)
            # A power may differ in its last bit on another machine.
            if not math.isclose(getattr(spec, name), default):
                limit = f"is not the default {default}, which derived says"
                raise SpecError(name, getattr(spec, name), limit)
        return made


_DEFAULTS = ("causal", "head_size_v", "scale")
"""The arguments of a LayerSpec whose defaults follow from the others."""


# Each backend asks several times. Working it out costs as much as the rest of validating a layer.
@functools.lru_cache(maxsize=4096)
def _required_features(spec: LayerSpec) -> Feature:
    return Feature(sum(flag.value for flag in FEATURES if flag.is_asked_by(spec)))


def _mla_of(mla: object) -> object:
    if not isinstance(mla, Mapping):
        return mla
    names = {f.name for f in dataclasses.fields(MLADims)}
    if set(mla) != names:
        raise SpecError("mla", dict(mla), f"must name exactly {', '.join(sorted(names))}")
    return MLADims(**mla)


def _check_mla(mla: object, kind: AttentionType, kv_heads: int, size: int, size_v: int | None) -> None:
    if not isinstance(mla, MLADims):
        raise SpecError("mla", mla, "must be an MLADims or None")
    if kind is not AttentionType.DECODER:
        raise SpecError("mla", mla, f"is for decoder layers, not {kind}")
    latent = mla.latent_size
    if kv_heads != 1:
        raise SpecError("num_kv_heads", kv_heads, "must be 1 with mla: all heads share one latent")
    if size != latent:
        raise SpecError("head_size", size, f"must be kv_lora_rank + qk_rope_head_dim = {latent} with mla")
    if size_v not in (None, mla.kv_lora_rank):
        raise SpecError("head_size_v", size_v, f"must be kv_lora_rank = {mla.kv_lora_rank} with mla")


def _check_head_scales(values: Mapping[str, Any]) -> None:
    """SpecError unless the layer's heads are stored as 8-bit floats."""
    stored = kv_format(stored_dtype_name(values["kv_cache_dtype"], values["dtype"]))
    if stored.feature != "fp8_kv":
        limit = f"needs pages of 8-bit floats, not kv_cache_dtype={values['kv_cache_dtype']!r}"
        raise SpecError("head_scales", True, limit, "give kv_cache_dtype='fp8'")
    for field in ("mla", "direct_kv", "state"):
        if values[field]:
            raise SpecError("head_scales", True, f"needs heads in pages, which a layer with {field} has not")


def check_layers(
    specs: object, limit: str = "must be a mapping of layer names to LayerSpec, such as ModelSpec.layers"
) -> None:
    """SpecError unless `specs` is a mapping to LayerSpec; `limit` is the text for anything but a mapping."""
    if not isinstance(specs, Mapping):
        raise SpecError("specs", specs, limit)
    for name, spec in specs.items():
        if not isinstance(name, str):
            raise SpecError("specs", name, "must have layer names as keys")
        if not isinstance(spec, LayerSpec):
            raise SpecError(f"specs[{name!r}]", spec, "must be a LayerSpec")
