"""The mistakes that the kit can name, the plainest first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from attnplug.testing.batches import Batch
from attnplug.testing.conformance.misreading_oracle import Reading
from attnplug.testing.oracle import OracleResult

__all__ = ["MISREADINGS", "MISWRITTEN_LSES", "Misreading", "MiswrittenLse"]


@dataclasses.dataclass(frozen=True, slots=True)
class Misreading:
    """A layer or batch that is misread.

    Args:
        name: what is wrong, as the failing check says it.
        asked: whether there is what the mistake gets wrong.
        changes: the fields of the right reading that it replaces.
    """

    name: str
    asked: Callable[[Reading], bool]
    changes: Callable[[Reading], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class MiswrittenLse:
    """A right output with a wrong LSE.

    Args:
        name: what is wrong.
        written: the LSE `[T, H]` that it gives, of the batch and the truth; NaN where nobody knows.
    """

    name: str
    written: Callable[[Batch, OracleResult], torch.Tensor]


def _always(it: Reading) -> bool:
    return True


def _is_windowed(it: Reading) -> bool:
    return it.is_windowed


def _is_causal(it: Reading) -> bool:
    return it.causal


def _is_not_causal(it: Reading) -> bool:
    return not it.causal


def _has_chunks(it: Reading) -> bool:
    return it.chunk is not None


def _has_cap(it: Reading) -> bool:
    return it.cap is not None


def _has_alibi(it: Reading) -> bool:
    return it.slopes is not None


def _has_sinks(it: Reading) -> bool:
    return it.sinks is not None


def _has_scale(it: Reading) -> bool:
    return it.scale != float(it.head_size**-0.5)


def _has_fp8(it: Reading) -> bool:
    return (it.k_scale, it.v_scale) != (1.0, 1.0)


def _has_several(it: Reading) -> bool:
    return sum((it.is_windowed, _has_chunks(it), _has_cap(it), _has_alibi(it), _has_sinks(it))) > 1


def _set(**fields: Any) -> Callable[[Reading], dict[str, Any]]:
    return lambda it: fields


def _in_order(*order: str) -> Callable[[Reading], dict[str, Any]]:
    return _set(order=order)


def _moved(side: str, step: int) -> Misreading:
    """A window whose limit before ("left") or after ("right") the query is one more or one less."""
    where, how = {"left": "before", "right": "after"}[side], {1: "many", -1: "few"}[step]
    return Misreading(
        f"window off by one: a key too {how} {where} the query",
        lambda it: getattr(it, side) < math.inf,
        lambda it: {side: getattr(it, side) + step},
    )


def _sinks(change: Callable[[torch.Tensor, Reading], torch.Tensor]) -> Callable[[Reading], dict[str, Any]]:
    return lambda it: {"sinks": None if it.sinks is None else change(it.sinks, it)}


def _scaled(
    before: Callable[[Reading], tuple[float, float]], now: Callable[[Reading], tuple[float, float]]
) -> Callable[[Reading], dict[str, Any]]:
    """Factors of keys and of values, left on what was stored before this step and in it."""

    def changes(it: Reading) -> dict[str, Any]:
        keys, values = zip(before(it), now(it), strict=True)
        return {"key_factors": keys, "value_factors": values}

    return changes


def _right(it: Reading) -> tuple[float, float]:
    return 1.0, 1.0


def _unscaled(it: Reading) -> tuple[float, float]:
    return 1 / it.k_scale, 1 / it.v_scale


def _unquantised(it: Reading) -> tuple[float, float]:
    return it.k_scale, it.v_scale


def _swapped(it: Reading) -> tuple[float, float]:
    return it.v_scale / it.k_scale, it.k_scale / it.v_scale


def _interleaved(it: Reading) -> dict[str, Any]:
    heads, kv_heads = len(it.kv_heads), int(it.kv_heads[-1]) + 1
    return {"kv_heads": torch.arange(heads) % kv_heads}


MISREADINGS: tuple[Misreading, ...] = (
    # What is asked for, ignored.
    Misreading("sliding window ignored", _is_windowed, _set(left=math.inf, right=math.inf)),
    Misreading("chunks ignored", _has_chunks, _set(chunk=None)),
    Misreading("soft cap ignored", _has_cap, _set(cap=None)),
    Misreading("sinks ignored", _has_sinks, _set(sinks=None)),
    Misreading("ALiBi ignored", _has_alibi, _set(slopes=None)),
    Misreading("causal mask ignored", _is_causal, _set(causal=False)),
    Misreading("non-causal taken as causal", _is_not_causal, _set(causal=True)),
    Misreading("softmax scale ignored", _has_scale, lambda it: {"scale": it.head_size**-0.5}),
    Misreading("fp8 scales ignored", _has_fp8, _scaled(_unscaled, _unscaled)),
    # What is asked for, by another convention.
    *(_moved(side, step) for side in ("left", "right") for step in (1, -1)),
    Misreading(
        "window taken as chunk",
        lambda it: it.causal and it.left < math.inf,
        lambda it: {"left": math.inf, "chunk": int(it.left) + 1},
    ),
    Misreading("chunk taken as window", _has_chunks, lambda it: {"chunk": None, "left": (it.chunk or 1) - 1}),
    Misreading("causal aligned at the start", _is_causal, _set(from_start=True)),
    Misreading(
        "queries aligned at the start",
        lambda it: not it.causal and (it.is_windowed or _has_alibi(it)),
        _set(from_start=True),
    ),
    Misreading("queries one position early", _always, _set(shift=-1)),
    Misreading("queries one position late", _always, _set(shift=1)),
    Misreading(
        "ALiBi before the cap",
        lambda it: _has_cap(it) and _has_alibi(it),
        _in_order("scale", "bias", "cap", "mask"),
    ),
    Misreading("soft cap after the mask", _has_cap, _in_order("scale", "bias", "mask", "cap")),
    Misreading("ALiBi before the scale", _has_alibi, _in_order("bias", "scale", "cap", "mask")),
    Misreading("ALiBi with the wrong sign", _has_alibi, _set(bias=lambda query, key: (key - query).abs())),
    Misreading("ALiBi of signed distances", _has_alibi, _set(bias=lambda query, key: key - query)),
    Misreading("ALiBi of key positions", _has_alibi, _set(bias=lambda query, key: key + 0 * query)),
    Misreading("scale left out", _always, _set(scale=1.0)),
    Misreading("scale applied twice", _always, lambda it: {"scale": it.scale**2}),
    Misreading("scale after the cap", _has_cap, _in_order("cap", "scale", "bias", "mask")),
    Misreading("sink counted twice", _has_sinks, _sinks(lambda sinks, it: sinks + math.log(2))),
    Misreading("sink in the numerator, with the first key's value", _has_sinks, _set(sink_value=0)),
    Misreading("sink in the numerator, with the last key's value", _has_sinks, _set(sink_value=-1)),
    Misreading("sink multiplied by the scale", _has_sinks, _sinks(lambda sinks, it: sinks * it.scale)),
    Misreading("sink in base 2", _has_sinks, _sinks(lambda sinks, it: sinks * math.log(2))),
    Misreading(
        "head groups interleaved", lambda it: 1 < int(it.kv_heads[-1]) + 1 < len(it.kv_heads), _interleaved
    ),
    Misreading("k_scale ignored", _has_fp8, _scaled(*[lambda it: (1 / it.k_scale, 1.0)] * 2)),
    Misreading("v_scale ignored", _has_fp8, _scaled(*[lambda it: (1.0, 1 / it.v_scale)] * 2)),
    Misreading("k_scale and v_scale swapped", _has_fp8, _scaled(_swapped, _swapped)),
    Misreading("fp8 scales ignored where keys are written", _has_fp8, _scaled(_right, _unquantised)),
    Misreading("fp8 scales ignored where keys are written and read", _has_fp8, _scaled(_unscaled, _right)),
    Misreading("pages of the next request", _always, _set(rows=lambda row, rows: (row + 1) % rows)),
    Misreading("pages of the request before", _always, _set(rows=lambda row, rows: (row - 1) % rows)),
    Misreading("pages of the first request", _always, _set(rows=lambda row, rows: 0)),
    # Nothing of what is asked for: the last resort.
    Misreading(
        "all features ignored",
        _has_several,
        lambda it: {
            **dict.fromkeys(("left", "right"), math.inf),
            **dict.fromkeys(("chunk", "cap", "slopes", "sinks")),
            "scale": it.head_size**-0.5,
        },
    ),
)


def _without_sinks(batch: Batch, truth: OracleResult) -> torch.Tensor:
    return batch.oracle(use_sinks=False).lse


def _transposed(batch: Batch, truth: OracleResult) -> torch.Tensor:
    return truth.lse.T.reshape(truth.lse.shape)


def _transposed_with_padding(batch: Batch, truth: OracleResult) -> torch.Tensor:
    padding = batch.query.shape[0] - truth.lse.shape[0]
    whole = torch.cat([truth.lse, truth.lse.new_full((padding, truth.lse.shape[1]), math.nan)])
    return whole.T.reshape(whole.shape)[: truth.lse.shape[0]]


MISWRITTEN_LSES: tuple[MiswrittenLse, ...] = (
    MiswrittenLse("LSE in base 2", lambda batch, truth: truth.lse / math.log(2)),
    MiswrittenLse(
        "LSE converted from base 2, in which it was not", lambda batch, truth: truth.lse * math.log(2)
    ),
    MiswrittenLse("LSE without the sink", _without_sinks),
    MiswrittenLse(
        "LSE of +inf where nothing is seen",
        lambda batch, truth: truth.lse.masked_fill(truth.lse == -math.inf, math.inf),
    ),
    MiswrittenLse("LSE transposed", _transposed),
    MiswrittenLse("LSE transposed, with its padding rows", _transposed_with_padding),
)
