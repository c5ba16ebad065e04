"""Follows tensors through attention that a module computes itself, from the product of queries and keys to the values.

Every operation between the two products is understood, or the attention is refused; likewise its heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.integrations.reader.mask_pattern import MaskPattern, matrix_pattern, together

if TYPE_CHECKING:
    from attnplug.integrations.reader.trace import Trace

_PRODUCTS: Final = frozenset({"matmul", "__matmul__", "bmm"})
_OTHER_PRODUCTS: Final = frozenset({"__rmatmul__", "baddbmm", "einsum"})
_TIMES: Final = frozenset({"__imul__", "__mul__", "__rmul__", "mul", "mul_", "multiply"})
_OVER: Final = frozenset({"__itruediv__", "__truediv__", "div", "div_", "true_divide"})
_PLUS: Final = frozenset({"__add__", "__iadd__", "__radd__", "add", "add_"})
_SAME: Final = frozenset(
    {"clone", "contiguous", "detach", "double", "dropout", "float", "to", "type", "type_as"}
)
_RESHAPES: Final = frozenset({"expand", "flatten", "reshape", "squeeze", "unflatten", "unsqueeze", "view"})
_MOVES: Final = frozenset({"permute", "swapaxes", "transpose"})
_CUTS: Final = frozenset({"__getitem__", "cat", "concat", "concatenate", "narrow", "pad"})
_REDUCES: Final = frozenset({"amax", "amin", "logsumexp", "max", "mean", "min", "norm", "std", "sum", "var"})
_INVERTS: Final = frozenset({"__eq__", "__invert__", "bitwise_not", "logical_not"})
# A number in place of a logit that hides its key: no model's logits reach it.
_HIDES: Final = -1e4

LOGITS: Final = object()
MASK: Final = object()
"""They replace the logits and the mask of the model in the arguments of a recorded operation."""

Operation = tuple[Callable[..., torch.Tensor], tuple[Any, ...], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnAttention:
    """Attention of a module's own, up to the product of its weights and values.

    `scaling` is the whole factor between `query @ key` and the logits. `before` is the part of it that queries and
    keys already have. `operations` change the logits up to the softmax; a `whole` one takes queries, keys and values.
    `factors` are the numbers whose product is `scaling`. `unknown` is the reason why it cannot be described.
    """

    query: torch.Tensor
    key: torch.Tensor
    before: float = 1.0
    scaling: float = 1.0
    factors: frozenset[float] = frozenset()
    mask: MaskPattern | None = None
    operations: tuple[Operation, ...] = ()
    whole: bool = False
    unknown: str = ""


class Follower:
    """Remembers which tensors are logits, or weights, and which are others times a number; tells `listener` the rest."""

    def __init__(self, listener: Trace) -> None:
        self._listener = listener
        # The tensors are kept alive too, because Python would reuse the id of a freed one.
        self._logits: dict[int, tuple[torch.Tensor, OwnAttention]] = {}
        self._weights: dict[int, tuple[torch.Tensor, OwnAttention, str]] = {}
        self._factors: dict[int, tuple[torch.Tensor, float, frozenset[float]]] = {}
        self._waiting: dict[int, tuple[OwnAttention, str]] = {}
        self._inverted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note one call of torch, other than a softmax."""
        name = getattr(func, "__name__", "")
        same = isinstance(result, torch.Tensor) and bool(args) and result is args[0]
        if name == "__setitem__" or (same and name not in _SAME | _RESHAPES):
            self._changed_in_place(args[0], name)
        if not isinstance(result, torch.Tensor) or not args:
            return
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        listed = [each for arg in args if isinstance(arg, (list, tuple)) for each in arg]
        if any(id(tensor) in self._weights for tensor in tensors):
            self._from_weights(name, args, tensors, result)
        elif name in _PRODUCTS | _OTHER_PRODUCTS:
            self._product(name, tensors, result)
        elif any(id(tensor) in self._logits for tensor in (*tensors, *listed)):
            self._from_logits(name, func, args, kwargs, result)
        elif name in _INVERTS and (name != "__eq__" or _number(args[1]) == 0):
            self._inverted[id(result)] = result, args[0]
        else:
            self._factor(name, args, result)

    def softmax(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: torch.Tensor, owner: str
    ) -> bool:
        """Note a softmax in the module `owner`; whether it is one of logits."""
        attention = self._logits_in(args[0] if args else kwargs.get("input"))
        if attention is None:
            return False
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if dim not in (-1, result.dim() - 1):
            attention = _unknown(attention, f"takes its softmax over dimension {dim}")
        self._waiting[id(result)] = attention, owner
        self._weights[id(result)] = result, attention, owner
        return True

    def whole(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], owner: str) -> None:
        """Note a call of torch's scaled_dot_product_attention in the module `owner`."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (given.pop(name) for name in names[:3])
        given.pop("dropout_p", None)
        before, factors = self._factors_of(query, key)
        attention = OwnAttention(query=query, key=key, before=before, factors=factors, whole=True)
        tensor, scale = given.get("attn_mask"), given.get("scale")
        mask = None if tensor is None else self._listener.mask_of(tensor)
        if given.get("is_causal"):
            mask = MaskPattern((-1, 0))
            if query.shape[-2] != key.shape[-2]:
                attention = _unknown(attention, "is causal over keys of another number")
        if isinstance(mask, str):
            attention, mask = _unknown(attention, "adds a mask or a bias of its own to its logits"), None
        if tensor is not None:
            given["attn_mask"] = MASK
        attention = dataclasses.replace(
            attention,
            mask=mask,
            scaling=before * (query.shape[-1] ** -0.5 if scale is None else scale),
            operations=((func, (), given),),
        )
        self._listener.own(owner, attention, value)

    def end(self) -> None:
        """Report weights that met no values."""
        for attention, owner in self._waiting.values():
            self._listener.own(owner, attention, None)

    def _logits_in(self, value: Any) -> OwnAttention | None:
        known = self._logits.get(id(value))
        return None if known is None else known[1]

    def _product(self, name: str, tensors: list[torch.Tensor], result: torch.Tensor) -> None:
        bases = (each if each._base is None else each._base for each in tensors)
        if len(tensors) < 2 or result.dim() < 3 or any(isinstance(b, torch.nn.Parameter) for b in bases):
            return
        query, key = tensors[-2:]
        if min(query.dim(), key.dim()) < 3:
            return
        before, factors = self._factors_of(query, key)
        attention = OwnAttention(
            query=query, key=key.transpose(-1, -2), before=before, scaling=before, factors=factors
        )
        if name in _OTHER_PRODUCTS:
            attention = _unknown(attention, f"multiplies queries and keys by {name}")
        self._logits[id(result)] = result, attention

    def _factors_of(self, *tensors: torch.Tensor) -> tuple[float, frozenset[float]]:
        known = [self._factors[id(tensor)] for tensor in tensors if id(tensor) in self._factors]
        return math.prod(factor for _, factor, _ in known), frozenset().union(*(used for _, _, used in known))

    def _factor(self, name: str, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """Note queries or keys that a module multiplies by a number."""
        first = args[0]
        _, factor, used = self._factors.get(id(first), (None, 1.0, frozenset()))
        if name in _TIMES | _OVER and len(args) > 1:
            number = _number(args[1]) if name in _OVER or _number(args[1]) else _number(first)
            if number:
                more = number if name in _TIMES else 1 / number
                self._factors[id(result)] = result, factor * more, used | {more}
                return
        if name in _SAME | _RESHAPES | _MOVES and used:
            self._factors[id(result)] = result, factor, used
        elif result is first:  # changed in place
            self._factors.pop(id(result), None)

    def _from_weights(
        self, name: str, args: tuple[Any, ...], tensors: list[torch.Tensor], result: torch.Tensor
    ) -> None:
        """Note an operation on weights: the product with their values, or one that leaves them as they are."""
        first = args[0]
        known = self._weights.get(id(first))
        if known is None:
            known = next(self._weights[id(tensor)] for tensor in tensors if id(tensor) in self._weights)
            self._report(known, f"applies {name} to its weights", None)
            return
        weights, attention, owner = known
        if name in _PRODUCTS:
            self._report(known, "", args[1])
        elif name in _SAME or (name in _RESHAPES and result.shape[-2:] == weights.shape[-2:]):
            self._weights[id(result)] = result, attention, owner
            self._waiting[id(result)] = self._waiting.pop(id(weights), (attention, owner))
        elif result.shape[-1:] == weights.shape[-1:] or name in _OTHER_PRODUCTS:
            self._report(known, f"applies {name} to its weights", None)

    def _report(
        self, known: tuple[torch.Tensor, OwnAttention, str], why: str, value: torch.Tensor | None
    ) -> None:
        weights, attention, owner = known
        self._waiting.pop(id(weights), None)
        self._listener.own(owner, _unknown(attention, why), value)

    def _changed_in_place(self, changed: torch.Tensor, name: str) -> None:
        """Note that some elements of a tensor, or all of what is a view of another one, are set."""
        base = changed if changed._base is None else changed._base
        for key, (tensor, attention) in self._logits.items():
            other = tensor is not changed and any(base is each for each in (tensor, tensor._base))
            if other or (tensor is changed and name == "__setitem__"):
                self._logits[key] = tensor, _unknown(attention, f"sets some of its logits by {name}")
        for known in list(self._weights.values()):
            if any(base is each for each in (known[0], known[0]._base)):
                self._report(known, f"sets some of its weights by {name}", None)
        if name == "__setitem__":
            self._factors.pop(id(changed), None)

    def _from_logits(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: torch.Tensor
    ) -> None:
        if name in _REDUCES or not result.is_floating_point():
            return  # a maximum or a mean becomes no weights
        each = (
            *args,
            *kwargs.values(),
            *(one for arg in args if isinstance(arg, (list, tuple)) for one in arg),
        )
        tensor, attention = next(known for one in each if (known := self._logits.get(id(one))) is not None)
        if result.shape[-1:] != tensor.shape[-1:] and name not in _CUTS:
            return  # most products of three dimensions are no logits, such as those of rotary embeddings
        if result.shape[-2:] != tensor.shape[-2:]:
            attention = _unknown(attention, f"applies {name} to its logits")
        elif name in _RESHAPES and args[0] is tensor:
            attention = _then(attention, func, LOGITS, *args[1:], **kwargs)
        elif name not in _SAME:
            attention = self._arithmetic(attention, name, func, args, kwargs)
        self._logits[id(result)] = result, attention

    def _arithmetic(
        self, attention: OwnAttention, name: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> OwnAttention:
        first, second, *rest = (*args, None)
        ours = self._logits_in(first) is attention
        other = second if ours else first
        number = _number(other)
        if number and (name in _TIMES or (name in _OVER and ours)):
            factor = number if name in _TIMES else 1 / number
            scaled = dataclasses.replace(
                attention, scaling=attention.scaling * factor, factors=attention.factors | {factor}
            )
            return _then(scaled, torch.mul, LOGITS, factor)
        if name in _PLUS and isinstance(other, torch.Tensor):
            return self._plus(attention, other)
        if name == "where" and self._logits_in(second) is attention:
            hidden = self._hide(attention, first, rest[0], inverted=False)
            return _then(hidden, torch.where, first, LOGITS, rest[0])
        if name in ("masked_fill", "masked_fill_") and ours:
            hidden = self._hide(attention, second, rest[0], inverted=True)
            return _then(hidden, torch.masked_fill, LOGITS, second, rest[0])
        return _unknown(attention, f"applies {name} to its logits")

    def _plus(self, attention: OwnAttention, mask: torch.Tensor) -> OwnAttention:
        pattern = self._listener.mask_of(mask)
        if isinstance(pattern, MaskPattern):
            return _masked(_then(attention, torch.add, LOGITS, MASK), pattern)
        # A mask of padding has one row for all queries, so it cannot contain a window.
        if not mask.is_meta and mask.dim() >= 2 and mask.shape[-2] == 1 and not bool(mask.any()):
            return attention
        return _unknown(attention, "adds a mask or a bias of its own to its logits")

    def _hide(
        self, attention: OwnAttention, mask: torch.Tensor, fill: Any, *, inverted: bool
    ) -> OwnAttention:
        """Attention to the keys that `mask` has, or those that it lacks; the others' logits get the number `fill`."""
        while id(mask) in self._inverted:
            mask, inverted = self._inverted[id(mask)][1], not inverted
        number = _number(fill)
        if mask.is_meta or mask.dtype is not torch.bool or number is None or number > _HIDES:
            return _unknown(
                attention, "hides keys by a mask of its own, whose values the reader does not have"
            )
        pattern = matrix_pattern(mask, inverted)
        if pattern is None:
            return _unknown(attention, "hides keys by a mask that is neither full, causal nor a window")
        return _masked(attention, pattern)


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.dim() == 0 and not value.is_meta else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _unknown(attention: OwnAttention, why: str) -> OwnAttention:
    return dataclasses.replace(attention, unknown=attention.unknown or why)


def _then(attention: OwnAttention, func: Any, *args: Any, **kwargs: Any) -> OwnAttention:
    operation = (func, args, kwargs)
    return dataclasses.replace(attention, operations=(*attention.operations, operation))


def _masked(attention: OwnAttention, mask: MaskPattern) -> OwnAttention:
    both = mask if attention.mask is None else together(attention.mask, mask)
    if both is None:
        return _unknown(attention, "combines two masks in a way that the reader does not know")
    return dataclasses.replace(attention, mask=both)


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nheads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def by_heads(
    attention: OwnAttention,
    value: torch.Tensor | None,
    modules: Sequence[torch.nn.Module],
    factors: Collection[float],
) -> Heads | str:
    """Queries, keys and values `[B, H, T, D]`, or a reason.

    Args:
        attention: what was followed.
        value: the values; None if the weights met none.
        modules: the module that attends, and those around it, the innermost first.
        factors: the numbers by which the module multiplied any tensor.
    """
    if attention.unknown or value is None:
        return attention.unknown or "does not multiply its weights with values"
    heads = _named(modules[:1], _HEADS)
    # [B, H, T, D] of [B * H, T, D].
    query, key, value = (
        each.reshape(-1, heads, *each.shape[1:])
        if each.dim() == 3 and heads and each.shape[0] % heads == 0
        else each
        for each in (attention.query, attention.key, value)
    )
    if not query.dim() == key.dim() == value.dim() == 4:
        shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
        return f"has queries, keys and values of the shapes {shapes}, whose heads are unknown"
    if query.shape[2] == key.shape[2] == 1:
        # Some decoders run the last token alone when they get a cache.
        return "has one query and one key, which show no mask"
    # Attention may see a copy of a KV head for every query head, and a cache would keep one.
    kv_heads = _named((modules[0], getattr(modules[0], "config", None)), _KV_HEADS)
    if kv_heads not in (None, key.shape[1]):
        return f"attends {key.shape[1]} KV heads, but names {kv_heads}"
    rest = sorted(set(factors) - attention.factors)
    if rest:
        return f"multiplies tensors by {', '.join(f'{each:.6g}' for each in rest)} in an unknown place"
    # One weight makes the queries, maybe with keys and values: those of channels do not fit. A module without weights
    # gets its queries from the one around it.
    weights = next((found for module in modules if (found := list(module.parameters()))), [])
    sizes = [times * query.shape[1] * query.shape[3] for times in (1, 2, 3)]
    if not any(length in sizes for weight in weights for length in weight.shape):
        return "has queries of a size that no weight of it has, so that they may be no tokens"
    return query, key, value


def _named(owners: Sequence[Any], names: Sequence[str]) -> int | None:
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if isinstance(value, int)), None)
