"""Backend rules of the user: from an argument, `use(...)` and the environment."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from attnplug._system.scopes import Scopes
from attnplug.core.errors import PolicyError
from attnplug.core.spec import KINDS, LayerSpec, Phase
from attnplug.registry.plugins.project import PROJECT, project_value
from attnplug.registry.plugins.switches import BACKEND as ENVIRONMENT

ARGUMENT = "backend"
"""The source of a rule: the argument, or --backend."""
USE = "attnplug.use"

_SCOPES = ("layer", "kind", "phase", "default")
"""The most specific first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One rule: this backend for these layers.

    Args:
        backend: a backend or family name, or `name@distribution`.
        scope: "layer", "kind", "phase", or "default" for everything.
        pattern: the layer-name glob, kind or phase; "*" for the default.
        source: "backend" (the argument), "attnplug.use", "ATTNPLUG_BACKEND" or "pyproject.toml".
    """

    backend: str
    scope: str
    pattern: str
    source: str

    def __str__(self) -> str:
        return self.backend if self.scope == "default" else f"{self.pattern}={self.backend}"

    def matches(self, spec: LayerSpec, phase: Phase | None, layer_name: str | None) -> bool:
        """Whether the rule is for this layer in this phase.

        A rule for everything else, or for a phase, is for attention: few backends serve state layers too.
        """
        if self.scope == "layer":
            return layer_name is not None and fnmatch.fnmatchcase(layer_name, self.pattern)
        if self.scope == "kind":
            return self.pattern in spec.kinds
        if spec.state is not None:
            return False
        if self.scope == "phase":
            return phase is not None and self.pattern == phase
        return True


def parse_rules(given: str | Mapping[str, str] | None, source: str = ARGUMENT) -> tuple[Rule, ...]:
    """Rules, most specific first, from "FLASH_ATTN,sliding=TRITON,decode=FLASHINFER" or a mapping.

    A key is a kind of layer (KINDS), a phase, or else a layer-name glob (the longest first). A bare
    name, or the key "*", is for all other attention layers. State layers follow a rule for "state", "conv" or their
    names alone. If a layer has two kinds, the one that
    `LayerSpec.kinds` names first decides.

    Raises:
        PolicyError: an empty or repeated part, or a value that is not text.
    """
    if given is None or given == "":
        return ()
    if isinstance(given, str):
        return _parse_text(given, source)
    if not isinstance(given, Mapping):
        remedy = "as 'TORCH', 'TORCH,sliding=TRITON' or {'sliding': 'TRITON'}"
        raise PolicyError(source, given, "must be a backend name, rules, or a mapping of rules", remedy)
    return _ordered(given.items(), given, source)


# Each selection reads the environment variable, so its text is parsed only once.
@functools.lru_cache(maxsize=256)
def _parse_text(text: str, source: str) -> tuple[Rule, ...]:
    pairs = []
    for part in text.split(","):
        key, equals, name = part.rpartition("=")
        pairs.append((key if equals else "*", name))
    return _ordered(pairs, text, source)


def _ordered(pairs: Any, given: object, source: str) -> tuple[Rule, ...]:
    rules: dict[str, Rule] = {}
    for key, name in pairs:
        if not (isinstance(key, str) and isinstance(name, str) and key.strip() and name.strip()):
            raise PolicyError(source, given, "has an empty part; write NAME or KEY=NAME, with commas between")
        pattern = key.strip()
        if pattern in rules:
            raise PolicyError(source, given, f"has two rules for {pattern!r}")
        rules[pattern] = Rule(name.strip(), _scope(pattern), pattern, source)
    return tuple(sorted(rules.values(), key=_specificity))


def _specificity(rule: Rule) -> tuple[int, int]:
    # Kinds in the order of LayerSpec.kinds: the type of attention comes before the keys that it sees.
    within = KINDS.index(rule.pattern) if rule.scope == "kind" else len(rule.pattern)
    return _SCOPES.index(rule.scope), -within


def _scope(pattern: str) -> str:
    if pattern == "*":
        return "default"
    if pattern in KINDS:
        return "kind"
    return "phase" if pattern in tuple(Phase) else "layer"


def rule_for(
    rule_sets: Sequence[tuple[Rule, ...]], spec: LayerSpec, phase: Phase | None, layer_name: str | None
) -> Rule | None:
    """The first rule that matches, looking through the sets in order: argument, `use`, environment, project."""
    every = (rule for rules in rule_sets for rule in rules)
    return next((rule for rule in every if rule.matches(spec, phase, layer_name)), None)


def phase_rule_for(
    rule_sets: Sequence[tuple[Rule, ...]], spec: LayerSpec, layer_name: str | None
) -> Rule | None:
    """The rule for one phase that chooses this layer's backend in that phase; None if no such rule does."""
    # An encoder computes all its tokens at once, so it has no decodes.
    phases = (Phase.PREFILL,) if spec.is_encoder else tuple(Phase)
    found = (rule_for(rule_sets, spec, phase, layer_name) for phase in phases)
    return next((rule for rule in found if rule is not None and rule.scope == "phase"), None)


USE_BLOCKS: Scopes[tuple[tuple[Rule, ...], Any]] = Scopes("attnplug_use")
"""The rules and the options of the `use` blocks around this point, innermost first."""


def rule_sets(backend: str | Mapping[str, str] | None = None) -> tuple[tuple[Rule, ...], ...]:
    """The rules in force here, in order: the argument's, of `use` blocks, the environment's, the project's.

    Raises:
        PolicyError: rules that cannot be parsed.
    """
    return (
        parse_rules(backend, ARGUMENT),
        *(rules for rules, _ in USE_BLOCKS.get()),
        parse_rules(os.environ.get(ENVIRONMENT), ENVIRONMENT),
        parse_rules(project_value("backend"), PROJECT),
    )


def use(backend: str | Mapping[str, str] | None = None, *, options: Any = None) -> _Use:
    """Ask for a backend, or rules, for every selection made inside the block.

    A context variable keeps the rules, so other threads and tasks do not see them, except a task that begins inside.
    Blocks nest; the inner one comes first. They may end in any order, and a rule holds until its own block ends. An
    argument of `select` comes before both, `ATTNPLUG_BACKEND` after.

    Args:
        backend: a backend or family name, rules as text, or a mapping of rules.
        options: options as `select` takes them.

    Raises:
        PolicyError: rules that cannot be parsed.
    """
    return _Use(backend, options)


class _Use(contextlib.ContextDecorator, AbstractContextManager[None]):
    """The block of one call of `use`; as a decorator, each call of the function is a block of its own."""

    def __init__(self, backend: str | Mapping[str, str] | None, options: Any) -> None:
        self._backend, self._options = backend, options
        self._block: AbstractContextManager[Any] | None = None

    def _recreate_cm(self) -> Self:
        return type(self)(self._backend, self._options)

    def __enter__(self) -> None:
        if self._block is not None:
            remedy = "call attnplug.use anew for each block"
            raise PolicyError(USE, self._backend, "is the call of a block that has begun before", remedy)
        block = USE_BLOCKS.block((parse_rules(self._backend, USE), self._options))
        self._block = block
        block.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._block is not None:
            self._block.__exit__(*raised)
