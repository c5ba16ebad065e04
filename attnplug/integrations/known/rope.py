"""Checks of rotary embeddings: their kind decides whether transformers can build the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attnplug.integrations.known.fields import Check, listed, number, one_of, optional, whole

_FACTOR: Final = number(1, 1e6)
_POSITIONS: Final = whole(2, 1 << 24)
_SHARED: Final[dict[str, Check]] = {"rope_theta": number(2)}
_KINDS: Final[dict[str, dict[str, Check]]] = {
    "default": {},
    "linear": {"factor": _FACTOR},
    "dynamic": {"factor": _FACTOR},
    "llama3": {
        "factor": _FACTOR,
        "low_freq_factor": number(0.01, 1e3),
        "high_freq_factor": number(0.01, 1e3),
        "original_max_position_embeddings": _POSITIONS,
    },
    "yarn": {
        "factor": _FACTOR,
        "original_max_position_embeddings": _POSITIONS,
        "attention_factor": optional(number(0.01, 1e3)),
        "beta_fast": number(1, 1e3),
        "beta_slow": number(0.01, 1),
        "mscale": number(0.01, 1e2),
        "mscale_all_dim": number(0.01, 1e2),
        "truncate": one_of(True, False),
    },
    "longrope": {
        "short_factor": listed(number(0.01, 1e6)),
        "long_factor": listed(number(0.01, 1e6)),
        "original_max_position_embeddings": _POSITIONS,
        "attention_factor": optional(number(0.01, 1e3)),
        "factor": optional(_FACTOR),
    },
}
"""Values of each kind."""
_REQUIRED: Final = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
USUAL: Final = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_of(
    data: Mapping[str, Any], rotary_size: int, kinds: tuple[str, ...] = USUAL, share: float | None = None
) -> dict[str, Any] | None:
    """The parameters of a model with one rotary embedding, with its `rope_type`; None if they are not known.

    Args:
        data: the configuration. Older files have `rope_scaling` and `rope_theta` for `rope_parameters`.
        rotary_size: elements of a head that rotate.
        kinds: the kinds that the model type can have.
        share: the `partial_rotary_factor` that the caller has found; None where the model type has none.
    """
    old, new, theta = (data.get(name) for name in ("rope_scaling", "rope_parameters", "rope_theta"))
    if rotary_size < 2 or rotary_size % 2 or (old and new):
        return None
    # Empty values of any type have other meanings in other versions of transformers.
    if any(given is not None and not given for given in (old, new)):
        return None
    if not ((theta is None and "rope_theta" not in data) or number(2)(theta)):
        return None
    given = old or new or {}
    if type(given) is not dict:
        return None
    rope = dict(given)
    if rope.pop("partial_rotary_factor", share if share is not None else 1.0) != (share or 1.0):
        return None
    return rope if _is_known(rope, rotary_size, kinds) else None


def each_rope_is_known(ropes: Mapping[str, Any], rotary_size: int, kinds: tuple[str, ...]) -> bool:
    """Whether all of a model's rotary embeddings, by layer type, are of `kinds`."""
    return all(type(rope) is dict and _is_known(dict(rope), rotary_size, kinds) for rope in ropes.values())


def _is_known(rope: dict[str, Any], rotary_size: int, kinds: tuple[str, ...]) -> bool:
    """Whether transformers can build an embedding of `rope`; sets its `rope_type`."""
    legacy = rope.pop("type", None)
    kind = rope.setdefault("rope_type", legacy or "default")
    if kind not in kinds or legacy not in (None, kind):
        return False
    checks = {**_SHARED, **_KINDS[kind]}
    if any(name not in rope for name in _REQUIRED[kind]):
        return False
    if not all(name in checks and checks[name](value) for name, value in rope.items() if name != "rope_type"):
        return False
    # Llama 4 Scout has equal factors, so that no frequency lies between both.
    if kind == "llama3" and rope["high_freq_factor"] < rope["low_freq_factor"]:
        return False
    if kind == "longrope":
        return len(rope["short_factor"]) == len(rope["long_factor"]) == rotary_size // 2
    return True
