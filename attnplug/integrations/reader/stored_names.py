"""Which layers' caches the module names in a quantizer's configuration are about. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from attnplug._system.text import shown
from attnplug.core.errors import ModelConfigError

REMEDY: Final = "give kv_cache_dtype (--kv-cache-dtype), such as bfloat16"
Caches = Callable[[], Sequence[str]]
"""Gives the paths of the attention modules that have a cache, such as `model.layers.0.self_attn`."""

_KEYS: Final = ("k_proj", "key", "key_proj", "k", "wk")
_VALUES: Final = ("v_proj", "value", "value_proj", "v", "wv")
_BOTH: Final = (
    *("kv_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "qkv"),
    *("kv_a_proj_with_mqa", "kv_b_proj"),
)
"""Names of the projections to keys, to values and to both, inside an attention module."""
_OF_KEYS: Final = re.compile(r"(^|[^a-z])(k|kv|qkv)(_|\b)|key")
_OF_VALUES: Final = re.compile(r"(^|[^a-z])(v|kv|qkv)(_|\b)|value")
PROJECTION: Final = re.compile(r"(^|[^a-z])(k|v|kv|qkv)_proj|(key|value)$")
_ATTENTION: Final = re.compile(r"(Attention|(self_)?attn|attention)\$?$")
"""Targets that are the attention itself: a class (`LlamaAttention`) or a module (`re:.*self_attn$`), no part of it."""
_CLASS: Final = re.compile(r"[A-Za-z_]\w*Attention")
_TAIL: Final = re.compile(r"[A-Za-z_]\w*\.\d+\..*")
# Checkpoints name the same layer with other prefixes than the class does.
_BEFORE: Final = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")


def about_projections(place: str, targets: Iterable[str], caches: Caches) -> list[str]:
    """The targets that name projections to keys or values, by their words or by the names of the model's modules."""
    parts = (*_KEYS, *_VALUES, *_BOTH)
    return [
        target
        for target in targets
        if PROJECTION.search(target)
        or (_is_pattern(target) and any(_covers(place, target, path, parts) for path in caches()))
    ]


def about_attention(place: str, targets: Iterable[str], caches: Caches) -> list[str]:
    """The targets that name attention modules, and not all that is inside them."""
    return [
        target
        for target in targets
        if _ATTENTION.search(target)
        or (
            _is_pattern(target)
            and any(
                _matches(place, target, path, whole=True)
                and not _matches(place, target, f"{path}.q_proj", whole=True)
                for path in caches()
            )
        )
    ]


def check_projections(
    place: str, targets: Sequence[str], caches: Caches, ignored: Sequence[str] = ()
) -> None:
    """Refuse targets that cover keys alone, values alone, or only the projections of some layers."""
    paths = caches()

    def names(target: str, path: str, own: tuple[str, ...], other: tuple[str, ...]) -> bool:
        # "*v_proj" fits kv_proj too, and means v_proj in a model that may have either.
        return _covers(place, target, path, own) or (
            _covers(place, target, path, _BOTH) and not _covers(place, target, path, other)
        )

    def covered(own: tuple[str, ...], other: tuple[str, ...]) -> set[str]:
        return {
            path
            for path in paths
            if any(names(target, path, own, other) for target in targets)
            and not any(names(target, path, own, other) for target in ignored)
        }

    keys, values = covered(_KEYS, _VALUES), covered(_VALUES, _KEYS)
    if not keys and not values:  # projections with names of their own
        texts = [target.lower() for target in targets]
        keys, values = (
            {"a layer"} if any(part.search(text) for text in texts) else set()
            for part in (_OF_KEYS, _OF_VALUES)
        )
    if bool(keys) != bool(values):
        one, other = ("keys", "values") if keys else ("values", "keys")
        raise ModelConfigError(
            f"{place}={shown(list(targets))}: names {one} and not {other}, and a layer stores both alike; {REMEDY}"
        )
    _check_all(place, len(keys & values & set(paths)), len(set(paths)))


def check_modules(place: str, targets: Sequence[str], caches: Caches, ignored: Sequence[str] = ()) -> None:
    """Refuse targets that name the attention modules of some layers only."""
    paths = set(caches())

    def is_named(path: str, names: Sequence[str]) -> bool:
        return any(_matches(place, target, path) for target in names)

    covered = [path for path in paths if is_named(path, targets) and not is_named(path, ignored)]
    _check_all(place, len(covered), len(paths))


def _check_all(place: str, covered: int, layers: int) -> None:
    if covered < layers:
        raise ModelConfigError(
            f"{place}: names the caches of {covered} of {layers} layers, which would differ; {REMEDY}"
        )


def fits(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern, where "*" matches any letters."""
    # Not fnmatch: it normalizes case on some systems, and these names are not paths.
    text = "".join(".*" if letter == "*" else re.escape(letter) for letter in pattern)
    return name == pattern or re.fullmatch(text, name) is not None


def _is_pattern(target: str) -> bool:
    """Whether a target is more than the name of a class, which says no module."""
    return target.startswith("re:") or "." in target or "*" in target


def _covers(place: str, target: str, path: str, parts: Iterable[str]) -> bool:
    return any(_matches(place, target, f"{path}.{part}") for part in parts)


def _matches(place: str, target: str, name: str, whole: bool = False) -> bool:
    """Whether a target names a module; `whole` for regexes that have to match the whole name."""
    tail = found[0] if (found := _TAIL.search(name)) else name
    names = {name, *(f"{before}{tail}" for before in _BEFORE)}
    if not target.startswith("re:"):
        ends = any(name.endswith(f".{target}") or fits(name, target) for name in names)
        return ends or _CLASS.fullmatch(target) is not None
    try:
        pattern = re.compile(target.removeprefix("re:"))
    except re.error as error:
        raise ModelConfigError(
            f"{place}={shown(target)}: is no regular expression: {error}; {REMEDY}"
        ) from error
    # compressed-tensors matches the beginning of a name.
    return any(pattern.fullmatch(each) if whole else pattern.match(each) for each in names)
