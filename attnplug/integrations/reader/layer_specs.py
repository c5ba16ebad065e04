"""Turns a recorded attention call into a LayerSpec, or refuses one that a LayerSpec cannot describe."""

from __future__ import annotations

import dataclasses
import inspect
import math

import torch

from attnplug.core.errors import ModelConfigError, SpecError
from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.integrations.model_spec import Client, make_spec
from attnplug.integrations.reader.mask_pattern import MaskPattern
from attnplug.integrations.reader.number_checks import (
    CheckFailedError,
    check_eager,
    check_own,
    measured_factor,
)
from attnplug.integrations.reader.trace import AttentionCall

_UNDERSTOOD = frozenset({"sliding_window", "softcap", "s_aux", "is_causal", "indices"})
_BOOKKEEPING = frozenset(
    {"cache_position", "layer_idx", "logits_to_keep", "past_key_values", "position_ids", "return_dict"}
    | {"use_cache"}
)
_EXPLAINED = {
    "position_bias": "adds a relative position bias (T5-like) to its logits",
    "block_indices": "selects whole blocks of keys",
}
_LATENT_PARTS = frozenset(
    {"gate_proj", "indexer", "kv_a_layernorm", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    | {"q_a_layernorm", "q_a_proj", "q_b_proj", "q_gate_proj", "q_proj", "rotary_emb"}
)
_LATENT_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclasses.dataclass(kw_only=True, eq=False)
class SpecMaker:
    """Makes the specs of one model for `ranks` ranks; `query_length` is the number of decoder tokens.

    A model that `generates` keeps keys and values from one forward to the next.
    """

    is_encoder_decoder: bool
    has_cross_attention: bool
    generates: bool
    query_length: int
    ranks: int
    kv_cache_dtype: str
    client: Client
    _checked: dict[object, bool] = dataclasses.field(default_factory=dict, init=False)
    _factors: dict[object, float] = dataclasses.field(default_factory=dict, init=False)

    def spec(self, call: AttentionCall) -> LayerSpec:
        """The spec of `call`. ModelConfigError names the layer and the property that a LayerSpec lacks."""
        _check_keywords(call)
        _check_shapes(call)
        # Python's root of a negative number, such as of a negative query_pre_attn_scalar, is complex.
        if isinstance(call.scaling, complex):
            raise _refused(call, f"scales its logits by {call.scaling:.4g}, which is not a real number")
        pattern = _pattern(call)
        kind = self._kind(call, pattern)
        expands = self.client is Client.TRANSFORMERS
        paged = not expands and self._is_paged(call, kind)
        if expands and call.keywords.get("indices") is not None:
            name = type(call.module).__name__
            raise ModelConfigError(
                f"{call.path}: {name} attends chosen keys only, and sparse attention is not served through transformers"
            )
        if paged and call.query.shape[0] != 1:
            raise _refused(call, f"folds other dimensions into its batch of {call.query.shape[0]}")
        has_sinks = self._check_for_sinks(call)
        mla = None if expands else _latent_dims(call)
        sizes = {"head_size": call.query.shape[3], "head_size_v": call.value.shape[3]}
        if mla is not None:
            sizes = {"head_size": mla.kv_lora_rank + mla.qk_rope_head_dim}
        return make_spec(
            call.path,
            num_heads=call.query.shape[1],
            num_kv_heads=call.key.shape[1] if mla is None else 1,
            ranks=self.ranks,
            dtype=_dtype(call),
            # Encoder layers keep no pages, so a storage dtype would mean nothing to them.
            kv_cache_dtype=self.kv_cache_dtype if paged else "auto",
            attn_type=kind,
            causal=pattern.causal,
            scale=call.scaling if expands else _scale(call) * self._factor(call),
            window=pattern.window,
            chunk_size=pattern.chunk_size,
            logits_soft_cap=call.keywords.get("softcap"),
            has_sinks=has_sinks,
            mla=mla,
            sparse=_sparse(call),
            mm_prefix=pattern.blockwise,
            direct_kv=not paged,
            **sizes,
        )

    def _kind(self, call: AttentionCall, pattern: MaskPattern) -> AttentionType:
        queries, keys = call.query.shape[2], call.key.shape[2]
        if queries != keys:
            if call.mask is None and call.keywords.get("is_causal", getattr(call.module, "is_causal", False)):
                raise _refused(
                    call, f"has {queries} causal queries and {keys} keys, which is not plain attention"
                )
            if pattern.window != (-1, -1):
                raise _refused(call, "hides encoder keys from cross attention")
            return AttentionType.ENCODER_DECODER
        if pattern.causal:
            return AttentionType.DECODER
        if not self.is_encoder_decoder:
            return AttentionType.ENCODER_ONLY
        # Encoder and decoder run with different lengths, so the length tells which of them calls.
        if queries == self.query_length:
            raise _refused(call, "is not causal in the decoder")
        return AttentionType.ENCODER

    def _is_paged(self, call: AttentionCall, kind: AttentionType) -> bool:
        """Whether keys and values outlive the call, in a cache of the model."""
        names = inspect.signature(call.module.forward).parameters
        keeps = any("past_key_value" in name or "cache" in name or name == "layer_past" for name in names)
        if kind is AttentionType.ENCODER_DECODER:
            return call.query.shape[2] == self.query_length and (
                self.has_cross_attention or (keeps and self.generates)
            )
        return kind is AttentionType.DECODER and keeps

    def _factor(self, call: AttentionCall) -> float:
        """`measured_factor`, once for calls of the same code with the same numbers; 1.0 for a module without any."""
        if not call.constants:
            return 1.0
        key = (type(call.module), call.constants, call.query.shape, call.key.shape)
        # NaN is a number that the run cannot know, and equals nothing.
        if key not in self._factors:
            try:
                self._factors[key] = measured_factor(call)
            except CheckFailedError as error:
                raise _refused(
                    call, f"multiplies tensors by numbers that cannot be measured: {error}"
                ) from error
        return self._factors[key]

    def _check_for_sinks(self, call: AttentionCall) -> bool:
        """`check_eager` or `check_own`, run once for calls of the same code and shapes."""
        own = call.own
        names = getattr(getattr(call.eager, "__code__", None), "co_names", ())
        settings = [(name, vars(call.module).get(name)) for name in names]
        key = (
            call.eager,
            own and (own.before, own.mask, own.whole, tuple(func for func, _, _ in own.operations)),
            type(call.module),
            call.query.shape[1:],
            call.key.shape[1:],
            call.value.shape[1:],
            call.scaling,
            tuple(
                (name, tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value))
                for name, value in sorted(call.keywords.items())
            ),
            tuple(name for name, _ in call.module.named_parameters(recurse=False)),
            # Plain attributes of the module that the file's own attention names, such as a layer's index.
            tuple((name, value) for name, value in settings if isinstance(value, (bool, int, float, str))),
        )
        if key not in self._checked:
            try:
                if own is not None:
                    check_own(call, own)
                self._checked[key] = own is None and check_eager(call)
            except CheckFailedError as error:
                raise _refused(call, f"cannot be verified: {error}") from error
        return self._checked[key]


def is_another_sequence(call: AttentionCall, earlier: AttentionCall) -> bool:
    """Whether both calls read different places of the same tensors, so that they are sequences of one batch."""
    return all(
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() != other.storage_offset()
        for one, other in zip(
            (call.query, call.key, call.value), (earlier.query, earlier.key, earlier.value), strict=True
        )
    )


def _refused(call: AttentionCall, reason: str) -> ModelConfigError:
    return ModelConfigError(
        f"{call.path}: {type(call.module).__name__} {reason}; a LayerSpec cannot describe that"
    )


def _check_keywords(call: AttentionCall) -> None:
    for name, value in call.keywords.items():
        if value is False or name in _UNDERSTOOD | _BOOKKEEPING or name.startswith("output_"):
            continue
        reason = _EXPLAINED.get(name, f"passes {name} to attention, which the reader does not know")
        raise _refused(call, reason)


def _check_shapes(call: AttentionCall) -> None:
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    shapes = f"query {tuple(query)}, key {tuple(key)}, value {tuple(value)}"
    if not all((*query, *key, *value)):
        raise _refused(call, f"has a dimension of size 0 ({shapes})")
    if query[0] != key[0] or key[:3] != value[:3] or query[3] != key[3] or query[1] % key[1]:
        raise _refused(call, f"folds other dimensions into batch or heads ({shapes})")
    groups = getattr(call.module, "num_key_value_groups", None)
    if isinstance(groups, int) and query[1] != key[1] * groups:
        raise _refused(
            call, f"has {query[1]} query heads and {key[1]} KV heads, but num_key_value_groups={groups}"
        )


def _pattern(call: AttentionCall) -> MaskPattern:
    if isinstance(call.mask, str):
        raise _refused(call, f"has a mask that cannot be read: {call.mask}")
    if call.mask is None:
        causal = call.keywords.get("is_causal", getattr(call.module, "is_causal", None))
        if call.query.shape[2] == call.key.shape[2] and causal is not False:
            raise _refused(call, "gets no mask and does not define whether it is causal")
        return MaskPattern((-1, -1))
    window = call.keywords.get("sliding_window")
    if window is not None and call.mask.causal and call.mask.window != (window - 1, 0):
        raise _refused(call, f"passes sliding_window={window}, which contradicts its mask")
    return call.mask


def _scale(call: AttentionCall) -> float:
    """The scale that the call passes, without numbers that the module applies before it."""
    return float(call.query.shape[3] ** -0.5 if call.scaling is None else call.scaling)


def _dtype(call: AttentionCall) -> str:
    dtypes = {call.query.dtype, call.key.dtype, call.value.dtype}
    if call.own is not None:
        dtypes = {call.value.dtype}  # many modules compute their logits in float32
    served = {torch.float16, torch.bfloat16, torch.float32}
    if len(dtypes) > 1 or not dtypes <= served or not math.isfinite(_scale(call)):
        raise _refused(call, f"mixes dtypes ({', '.join(sorted(map(str, dtypes)))})")
    return str(dtypes.pop()).removeprefix("torch.")


def _sparse(call: AttentionCall) -> SparseSpec | None:
    """The SparseSpec of a call that gets the indices `[B, n, k]` of chosen keys; None without indices."""
    # The indexer of a short prompt chooses fewer keys than it may, so their number is read from the module.
    indices = call.keywords.get("indices")
    if indices is None:
        return None
    # Layers that share the indices of a layer before them have no indexer of their own.
    owners = (getattr(call.module, "indexer", None), getattr(call.module, "config", None))
    topk = next(
        (found for owner in owners if (found := getattr(owner, "index_topk", None)) is not None), None
    )
    if not isinstance(topk, int):
        raise _refused(call, "gets indices of chosen keys, and no index_topk says how many there may be")
    shape = tuple(indices.shape) if isinstance(indices, torch.Tensor) else None
    expected = (1, call.query.shape[2], min(topk, call.key.shape[2]))
    if shape != expected:
        raise _refused(call, f"gets indices of the shape {shape}, where index_topk={topk} gives {expected}")
    try:
        return SparseSpec("token_topk", topk)
    except SpecError as error:
        raise ModelConfigError(f"{call.path}: {error}") from error


def index_key_size(call: AttentionCall) -> int | None:
    """Elements of the key that the indexer of the call's module keeps for each token; None without an indexer."""
    if call.keywords.get("indices") is None:
        return None
    size = getattr(getattr(call.module, "indexer", None), "head_dim", None)
    return size if isinstance(size, int) else None


def _latent_dims(call: AttentionCall) -> MLADims | None:
    """The MLADims of a module that caches a latent, of which keys and values must be linear; None for other modules."""
    module = call.module
    rank = getattr(module, "kv_lora_rank", None)
    if rank is None:
        return None
    name = f"{call.path}: {type(module).__name__}"
    parts = [part for part, _ in module.named_children() if part not in _LATENT_PARTS]
    if parts:
        raise ModelConfigError(
            f"{name} has parts that a LayerSpec with latent attention cannot describe: {', '.join(parts)}"
        )
    missing = [dim for dim in _LATENT_DIMS if not isinstance(getattr(module, dim, None), int)]
    if missing:
        raise ModelConfigError(f"{name} keeps a latent but lacks {', '.join(missing)}")
    sizes = {dim: getattr(module, dim) for dim in _LATENT_DIMS}
    nope, rope, size_v = sizes.values()
    if call.query.shape[3] != nope + rope or call.value.shape[3] != size_v:
        raise ModelConfigError(
            f"{name} has queries of {call.query.shape[3]} and values of {call.value.shape[3]} elements, "
            f"but latent dimensions of {nope} + {rope} and {size_v}"
        )
    try:
        return MLADims(q_lora_rank=getattr(module, "q_lora_rank", None), kv_lora_rank=rank, **sizes)
    except SpecError as error:
        raise ModelConfigError(f"{name}: {error}") from error
