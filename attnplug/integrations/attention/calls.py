"""One call of the attention function: keywords and tensors checked, then read as a LayerSpec and a mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch

from attnplug.core.errors import BatchError
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.integrations.attention.mask_functions import read_given_mask
from attnplug.integrations.attention.step_mask import PatternMask, StepMask
from attnplug.integrations.reader.mask_pattern import MaskPattern

_FULL = MaskPattern((-1, -1))
_EAGER = "use attn_implementation='eager'"
_OWN_ROWS = "give each sequence a row of its own, padded"
# Keywords that attention functions of modelling files never read: the mask contains positions and token types.
_INERT = frozenset(
    {"cache_position", "deterministic", "layer_idx", "logits_to_keep", "mm_token_type_ids"}
    | {"num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_values"}
    | {"position_ids", "return_dict", "token_type_ids", "use_cache"}
)
_KNOWN = frozenset({"is_causal", "sliding_window", "softcap", "s_aux"})
_PACKED = "says that sequences are packed in one row"
_UNSERVED = {
    "output_attentions": "attention weights are never computed as a whole",
    "head_mask": "scales the weights of whole heads, which a LayerSpec cannot describe",
    "position_bias": "is added to the logits, which a LayerSpec cannot describe",
    "indices": "picks single keys for each query: sparse attention is not served through transformers",
    "block_indices": "picks blocks of keys for each query, which a LayerSpec cannot describe",
    "cache": "is not the paged cache of transformers' continuous batching",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"), _PACKED),
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Keywords:
    """The keywords of one call that change its result."""

    is_causal: bool | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class AttentionCall:
    """One call: `query [B, H, Lq, D]`, `key [B, Hkv, Lk, D]`, `value [B, Hkv, Lk, Dv]` of `module`.

    `layer` names the module in errors. `one_sequence` says that its queries and keys come from one sequence.
    """

    module: torch.nn.Module
    layer: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    keywords: Keywords
    one_sequence: bool

    def check(self, dropout: float, scaling: Any) -> None:
        """Refuse training, and tensors that no mask makes servable.

        BatchError: dropout in training, gradients, or shapes, dtypes or a scale that are not served.
        """
        # Outside of training eager attention applies no dropout either, so the value is harmless there.
        if dropout and self.module.training:
            remedy = "call model.eval(), or set the model's attention dropout to 0"
            raise BatchError("dropout", dropout, f"cannot be served: {self.layer} is in training", remedy)
        tensors = {"query": self.query, "key": self.key, "value": self.value}
        # Frozen weights need no gradient, so such a model runs outside of no_grad too.
        learned = tensors if self.keywords.sinks is None else {**tensors, "s_aux": self.keywords.sinks}
        needing = [name for name, tensor in learned.items() if tensor.requires_grad]
        if needing and torch.is_grad_enabled():
            limit = f"cannot be served in {self.layer}: attnplug's backends have no backward pass"
            remedy = "run the model under torch.no_grad() or torch.inference_mode()"
            raise BatchError("requires_grad", needing, limit, remedy)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        query, key, value = self.query.shape, self.key.shape, self.value.shape
        fits = len(query) == len(key) == len(value) == 4 and key[:3] == value[:3]
        if not (fits and query[0] == key[0] and query[3] == key[3]):
            limit = f"must be [B, H, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv] in {self.layer}"
            raise BatchError("query, key, value", shapes, limit, _EAGER)
        dtypes = {str(tensor.dtype) for tensor in tensors.values()}
        if len(dtypes) > 1:
            raise BatchError("dtype", sorted(dtypes), f"query, key and value differ in {self.layer}")
        if scaling is not None and not isinstance(scaling, (int, float)):
            limit = f"must be a number in {self.layer}: a scale per head or token is not served"
            raise BatchError("scaling", type(scaling).__name__, limit, _EAGER)

    def mask(self, given: Any) -> StepMask:
        """The step's mask.

        Raises:
            BatchError: the mask has no known pattern or does not fit the tensors; or there is none, and
                the layer may be causal.
        """
        batch, q_length, kv_length = self.query.shape[0], self.query.shape[2], self.key.shape[2]
        if isinstance(given, PatternMask):
            step = given.step
            if isinstance(step, str):
                limit = f"cannot be served in {self.layer}: {step}"
                raise BatchError("attention_mask", tuple(given.shape), limit, f"{_OWN_ROWS}, or {_EAGER}")
            if (step.batch, step.q_length, step.kv_length) != (batch, q_length, kv_length):
                shape = (step.batch, 1, step.q_length, step.kv_length)
                limit = f"must be {(batch, 1, q_length, kv_length)} for the tensors of {self.layer}"
                raise BatchError("attention_mask", shape, limit, _EAGER)
            return step
        causal = self.keywords.is_causal
        if causal is None:
            causal = getattr(self.module, "is_causal", None)
        if isinstance(given, torch.Tensor):
            read = read_given_mask(given, batch, q_length, kv_length)
            if not isinstance(read, str) and not read.pattern.causal and causal and q_length > 1:
                read = "it is full, and the layer is causal"
            if isinstance(read, str):
                limit = (
                    f"in {self.layer} was not made by transformers' mask functions, and {read}: only causal, "
                    "windowed, chunked and full masks, with padding, are served"
                )
                found = f"{given.dtype} {tuple(given.shape)}"
                raise BatchError("attention_mask", found, limit, "pass a 2-D padding mask, or " + _EAGER)
            return read
        if given is not None:
            limit = f"in {self.layer} must be a tensor"
            raise BatchError("attention_mask", type(given).__name__, limit, _EAGER)
        if q_length > 1 and causal is not False:
            # Without a mask, eager attention sees every key, while sdpa and flash attention are causal.
            limit = f"in {self.layer} is ambiguous with is_causal={causal}: implementations differ in the keys they see"
            raise BatchError("attention_mask", None, limit, "pass is_causal=False, or " + _EAGER)
        return StepMask(pattern=_FULL, batch=batch, q_length=q_length, kv_length=kv_length)

    def check_positions(self, step: StepMask, given: Any) -> None:
        """Refuse positions `given [B or 1, Lq]` that restart inside a row whose mask separates no sequences.

        BatchError: transformers' mask lets such a sequence see those before it.
        """
        fits = isinstance(given, torch.Tensor) and given.ndim == 2 and given.shape[1] == step.q_length
        if not fits or not step.pattern.causal or step.segments is not None or given is step.positions:
            return
        positions = given.expand(step.batch, -1).cpu()
        if step.padding is not None:
            # Models number padding in many ways; it takes the position of the token before it.
            real = step.padding[:, step.q_offset : step.q_offset + step.q_length].cpu()
            positions = positions.masked_fill(~real, -1).cummax(dim=1).values.where(~real, positions)
        step_back = positions[:, 1:] < positions[:, :-1]
        again = (positions[:, 1:] == 0) & (positions[:, :-1] == 0)
        if bool((step_back | again).any()):
            row = int((step_back | again).any(dim=1).int().argmax())
            limit = f"must not start again inside a row here: the mask of {self.layer} separates no packed sequences"
            remedy = f"pass use_cache=False and no attention_mask or cache, or {_OWN_ROWS}"
            raise BatchError("position_ids", f"positions that go back in row {row}", limit, remedy)
        step.positions = given

    def spec(self, step: StepMask, scaling: float | None) -> LayerSpec:
        """The requirements of the call.

        Raises:
            BatchError: a window that contradicts the mask, or one over cross attention.
            SpecError: an impossible number, such as a scale below 0.
        """
        pattern = step.pattern
        kind = self._kind(step)
        if kind is AttentionType.ENCODER_DECODER and pattern.window != (-1, -1):
            limit = f"cannot be applied to the cross attention of {self.layer}"
            raise BatchError("window", pattern.window, limit, _EAGER)
        self._check_window(pattern)
        query = self.query.shape
        return LayerSpec(
            num_heads=query[1],
            num_kv_heads=self.key.shape[1],
            head_size=query[3],
            head_size_v=self.value.shape[3],
            dtype=self.query.dtype,
            attn_type=kind,
            causal=pattern.causal,
            scale=None if scaling is None else float(scaling),
            window=pattern.window,
            chunk_size=pattern.chunk_size,
            mm_prefix=pattern.blockwise,
            logits_soft_cap=self.keywords.softcap,
            has_sinks=self.keywords.sinks is not None,
            direct_kv=True,
        )

    def _kind(self, step: StepMask) -> AttentionType:
        if step.pattern.causal:
            return AttentionType.DECODER
        if step.keys_only or self.query.shape[2] != self.key.shape[2] or not self.one_sequence:
            return AttentionType.ENCODER_DECODER
        config = getattr(self.module, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            return AttentionType.ENCODER
        return AttentionType.ENCODER_ONLY

    def _check_window(self, pattern: MaskPattern) -> None:
        asked = self.keywords.sliding_window
        if asked is None or pattern.window[0] == asked - 1 or asked > self.key.shape[2]:
            return
        limit = (
            f"in {self.layer} contradicts its mask, which has window={pattern.window}, "
            f"chunk_size={pattern.chunk_size}"
        )
        raise BatchError("sliding_window", asked, limit, _EAGER)


def read_keywords(given: Mapping[str, Any], layer: str) -> Keywords:
    """The values of the keywords that `layer` passes.

    BatchError: a keyword that is unknown, or that asks for something not served.
    """
    for name, value in given.items():
        if name in _KNOWN or name in _INERT or value is None or value is False:
            continue
        why = _UNSERVED.get(name, "is not known to attnplug and may change the result")
        remedy = _OWN_ROWS if why is _PACKED else _EAGER
        raise BatchError(name, _shown(value), f"{why} (passed by {layer})", remedy)
    numbers: dict[str, Any] = {"sliding_window": int, "softcap": float}
    for name, kind in numbers.items():
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float, NoneType)):
            raise BatchError(name, _shown(value), f"must be a number (passed by {layer})", _EAGER)
        numbers[name] = None if value is None else kind(value)
    causal = given.get("is_causal")
    return Keywords(None if causal is None else bool(causal), sinks=given.get("s_aux"), **numbers)


def _shown(value: Any) -> object:
    """`value` for an error message; a tensor as its dtype and shape."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
