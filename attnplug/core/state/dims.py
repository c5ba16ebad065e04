"""The rule by which a state layer changes its state, and the fields of a spec that it allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from attnplug.core.checks import check_size
from attnplug.core.errors import SpecError

STATE_RULES: tuple[str, ...] = ("linear", "delta", "conv")
"""The rules of a StateDims."""
DECAYS: tuple[str, ...] = ("head", "row")
"""The forms of a decay: one number for each value head, or one for each row of its state."""
ACTIVATIONS: tuple[str, ...] = ("silu",)
"""The activations that outputs of a convolution may pass through."""
_MOST_DRAFTS = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateDims:
    """How the tokens of a request change the state of a layer.

    With the state S `[K, V]` of a value head, and the rows q, k `[K]` and v `[V]` of a token:

        S <- exp(g) * S;   u = v, or beta * (v - k S) with "delta";   S <- S + outer(k, u);   o = scale * q S

    Args:
        rule: "linear"; "delta", for gated delta nets; or "conv", a short convolution whose state is its last inputs.
        decay: "head" for one g of a value head, "row" for one g of each row of S; None with rule "conv".
        width: inputs of an output of a convolution, its own included: at least 2; None with other rules.
        activation: "silu" for a convolution whose outputs pass through it, or None.
        drafts: most draft tokens of a request that a step verifies. A step stores a state after each of them.

    Raises:
        SpecError: an unknown word, a number out of range, or a field that the rule does not have.
    """

    rule: str
    decay: str | None = None
    width: int | None = None
    activation: str | None = None
    drafts: int = 0

    def __post_init__(self) -> None:
        _check_word("rule", self.rule, STATE_RULES)
        object.__setattr__(self, "drafts", check_size("state.drafts", self.drafts, 0, _MOST_DRAFTS))
        if self.rule == "conv":
            if self.decay is not None:
                raise SpecError("state.decay", self.decay, "must be None with rule conv")
            object.__setattr__(self, "width", check_size("state.width", self.width, 2))
            if self.activation is not None:
                _check_word("activation", self.activation, ACTIVATIONS)
            return
        _check_word("decay", self.decay, DECAYS)
        for field in ("width", "activation"):
            if getattr(self, field) is not None:
                limit, remedy = f"must be None with rule {self.rule}", "declare the convolution as a layer"
                raise SpecError(f"state.{field}", getattr(self, field), limit, remedy)

    @property
    def kind(self) -> str:
        """The rule: the kind that a backend lists in `supported_state_rules`."""
        return self.rule

    def __str__(self) -> str:
        """The words of tables and reasons: "delta, decay per head", "conv of 4"."""
        text = f"{self.rule}, decay per {self.decay}"
        if self.rule == "conv":
            text = f"conv of {self.width}" + (f" {self.activation}" if self.activation else "")
        return text + (f", {self.drafts} drafts" if self.drafts else "")

    @classmethod
    def parse(cls, rule: str, detail: str, drafts: str = "0") -> Self:
        """The rule that the command line names: "delta,head", "conv,4" or "linear,row,3" with drafts."""
        given: dict[str, Any] = {"width": _number("width", detail)} if rule == "conv" else {"decay": detail}
        return cls(rule=rule, drafts=_number("drafts", drafts), **given)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The rule of a JSON object. SpecError for other fields."""
        names = {field.name for field in dataclasses.fields(cls)}
        if "rule" not in data or not set(data) <= names:
            raise SpecError(
                "state", dict(data), f"must name rule, and of {', '.join(sorted(names))} no other"
            )
        return cls(**data)


def _check_word(field: str, value: object, words: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in words:
        raise SpecError(f"state.{field}", value, f"must be one of {', '.join(words)}")


def _number(field: str, text: str) -> int:
    if not text.isdecimal():
        raise SpecError(f"state.{field}", text, "must be a number")
    return int(text)


def check_state(value: object, given: Mapping[str, Any]) -> StateDims | None:
    """The rule of a layer, if its other fields go with it.

    Args:
        value: a StateDims, or None.
        given: the other fields of the spec, checked.

    Raises:
        SpecError: `value` is neither; a field that means nothing beside `state`; sizes that the rule does not have.
    """
    if value is None:
        return None
    if not isinstance(value, StateDims):
        remedy = "give a StateDims, such as StateDims(rule='delta', decay='head')"
        raise SpecError("state", value, "must be a StateDims or None", remedy)
    if str(given["attn_type"]) != "decoder":
        raise SpecError("state", value, f"is for decoder layers, not {given['attn_type']}")
    for field, unset in _WITHOUT_MEANING.items():
        if given[field] != unset:
            raise SpecError(field, given[field], "means nothing beside state", "leave it out")
    if given["kv_cache_dtype"] not in STATE_DTYPES:
        limit = f"of a state must be one of {', '.join(STATE_DTYPES)}"
        raise SpecError("kv_cache_dtype", given["kv_cache_dtype"], limit)
    if value.rule == "conv":
        sizes = {"head_size": 1, "head_size_v": 1, "num_kv_heads": given["num_heads"]}
        for field, size in sizes.items():
            if given[field] != size:
                limit = f"must be {size} with rule conv: each of num_heads channels has its own state"
                raise SpecError(field, given[field], limit)
    return value


STATE_DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")
"""The storage dtypes of a state; "auto" is float32, and the layer's dtype for a convolution."""
_WITHOUT_MEANING: Mapping[str, object] = {
    "causal": True,
    "window": (-1, 0),
    "chunk_size": None,
    "logits_soft_cap": None,
    "has_sinks": False,
    "has_alibi": False,
    "mla": None,
    "sparse": None,
    "mm_prefix": False,
    "direct_kv": False,
    "needs_lse": False,
}
