"""Reasons for a refusal, for people and for programs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from attnplug.core.guarded import plain_text
from attnplug.core.text import shortened

REASON_CODES: tuple[str, ...] = (
    "head_size",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "sink",
    "mla",
    "sparse",
    "mm_prefix",
    "compute_capability",
    "device_type",
    "attn_type",
    "phase",
    "combination",
    "feature",
    "host_lengths",
    "kv_cache_layout",
    "not_installed",
    "version",
    "import_failed",
    "blocked",
    "conflict",
    "api_version",
    "plugin_error",
    "policy",
    "refuted",
    "context_parallel",
)
"""Every stable code, in the order of listed reasons. Features report `feature.<name>`."""

_MANY = 8
"""The least number of sizes in even steps that a sentence shortens to its ends."""


class Reason(str):
    """One cause why a backend does not serve a layer: a sentence that carries its facts.

    The sentence reads fact, value and limit, remedy:
    `head_size not supported: 80 is not one of 64, 128`. Being a `str`, a list of reasons is also
    the list of sentences that callers of vLLM's `validate_configuration` expect.
    """

    __slots__ = ("code", "field", "remedy", "requested", "supported")

    code: str
    """Stable name of the cause: one of REASON_CODES, or `feature.<name>`."""
    field: str | None
    """The LayerSpec or Device field at fault, if any."""
    requested: str | None
    """The value that the layer asks for."""
    supported: str | None
    """The values that are supported."""
    remedy: str | None
    """A step that the user can take, if there is one."""

    def __new__(
        cls,
        fact: str,
        *,
        code: str,
        field: str | None = None,
        requested: object = None,
        supported: object = None,
        remedy: str | None = None,
    ) -> Reason:
        """Compose the sentence from the plain `fact`, the value against its limit, and the remedy."""
        asked, limit = _words(requested), _words(supported)
        text = fact
        if asked is not None and limit is not None:
            text += f": {asked} is not {_limit(limit)}"
        elif asked is not None:
            text += f": {asked}"
        elif limit is not None:
            text += f": {limit}"
        if remedy:
            text += f"; {remedy}"
        data = {"text": text, "code": code, "field": field, "requested": asked, "supported": limit}
        return cls.from_dict(data | {"remedy": remedy})

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # The pickling of str would call __new__ without the required code.
        return type(self).from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, str | None]:
        """A JSON object: `text`, `code`, `field`, `requested`, `supported`, `remedy`."""
        facts = ("code", "field", "requested", "supported", "remedy")
        return {"text": str(self), **{name: getattr(self, name) for name in facts}}

    @classmethod
    def from_dict(cls, data: Mapping[str, str | None]) -> Reason:
        """The reason that `to_dict` wrote. TypeError for a value that is not text."""
        for name in ("text", *cls.__slots__):
            if not isinstance(data.get(name), str | None):
                raise TypeError(f"{name} of a reason must be text")
        # The text is a finished sentence; cls(...) would compose it again.
        # A plugin's sentence with line breaks could pass for lines of attnplug's own.
        text = shortened(data["text"] or "", _LONGEST)
        self = str.__new__(cls, " ".join(text.splitlines()))
        self.code = _short(data["code"]) or ""
        self.field, self.remedy = _short(data.get("field")), _short(data.get("remedy"))
        self.requested, self.supported = _short(data.get("requested")), _short(data.get("supported"))
        return self


def as_reason(item: str) -> Reason:
    """A sentence as a Reason: backends ported from vLLM return plain text."""
    return item if isinstance(item, Reason) else Reason(str(item), code="combination")


_FACTS = ("code", "field", "remedy", "requested", "supported")
_LONGEST = 4000
"""Characters of a reason and of each of its facts that are shown: a plugin may give text of any length."""


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= _LONGEST else shortened(text, _LONGEST)


def plain_reason(item: object) -> Reason:
    """What a plugin gave as a reason, as a Reason of plain and short texts.

    Raises:
        TypeError: it is a Reason without its facts.
    """
    if type(item) is Reason:
        # `str.__new__` makes a Reason without facts, of any text.
        facts = [getattr(item, name, item) for name in _FACTS]
        if type(facts[0]) is not str or not facts[0] or any(each is item for each in facts):
            raise TypeError("a reason without its code; make it by Reason(fact, code=...)")
        texts = (item, *(each for each in facts if each is not None))
        if (
            all(type(each) in (str, Reason) and len(each) <= _LONGEST for each in texts)
            and item.isprintable()
        ):
            return item
    if not isinstance(item, Reason):
        return Reason(plain_text(str(item)), code="combination")
    # A subclass of Reason may answer anything later.
    data = {name: None if fact is None else plain_text(fact) for name, fact in item.to_dict().items()}
    return Reason.from_dict(data)


_MOST = 1000
"""Values that a reason reads at most: a plugin may declare an endless iterator."""


def _words(value: object) -> str | None:
    if isinstance(value, Iterable) and not isinstance(value, str):
        items = list(itertools.islice(value, _MOST))
        value = _range(items) or ", ".join(str(item) for item in items)
    return None if value in (None, "") else str(value)


def _range(items: list[object]) -> str | None:
    """A long run of sizes as its ends, because nobody reads thirty numbers."""
    sizes = [item for item in items if type(item) is int]
    if len(sizes) < len(items) or len(sizes) < _MANY:
        return None
    step = sizes[1] - sizes[0]
    if step < 1 or any(later - size != step for size, later in itertools.pairwise(sizes)):
        return None
    return f"{sizes[0]} to {sizes[-1]} in steps of {step}"


def _limit(words: str) -> str:
    if ", " in words or " in steps of " in words:
        return f"one of {words}"
    return words.replace("multiples of", "a multiple of")
