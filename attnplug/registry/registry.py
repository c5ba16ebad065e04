"""Chooses among the backends that plugins offer, and remembers what it chose."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from attnplug._system.text import shown
from attnplug.core.checks import check_member
from attnplug.core.errors import PluginError, PolicyError, SpecError
from attnplug.core.spec import KINDS, LayerSpec, Phase, check_layers
from attnplug.registry.devices import DeviceLike, is_here, resolve_device
from attnplug.registry.measured.tuned_lookup import TableLookup, Tables, Tuned
from attnplug.registry.plugin_set import PluginSet
from attnplug.registry.plugins.installed import AssumeInstalled, freeze_assumed
from attnplug.registry.plugins.option_values import types_within
from attnplug.registry.plugins.options import VARIABLE as OPTIONS
from attnplug.registry.plugins.options import by_backend, check_options, freeze, parse_options, split_options
from attnplug.registry.plugins.project import PROJECT, Search, project_value
from attnplug.registry.plugins.switches import BACKEND as ENVIRONMENT
from attnplug.registry.plugins.waiting import waited
from attnplug.registry.selection.decision import Decision, Placement
from attnplug.registry.selection.evidence import Evidence, read_evidence
from attnplug.registry.selection.evidence_gate import AllowRefuted, EvidenceGate, allowed_names
from attnplug.registry.selection.negotiation import negotiated
from attnplug.registry.selection.policy import USE_BLOCKS, Rule, phase_rule_for, rule_for, rule_sets
from attnplug.registry.selection.selector import AUTOMATIC, Policy, decide, refusal

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.registry.plugins.records import PluginRecord

Rules: TypeAlias = str | Mapping[str, str] | None
"""One backend name for everything, rules as text, or a mapping of rules; see `parse_rules`."""

_PHASE_REMEDY = "select for a phase, use attnplug.plan, or ask for one backend named 'PREFILL+DECODE'"
_log = logging.getLogger("attnplug")
_MOST_DECISIONS = 16_384


class SelectKwargs(TypedDict, total=False):
    """The settings of a selection. Each may be None."""

    backend: Rules
    """A backend or family name, `name@distribution`, rules such as
    "FLASH_ATTN,sliding=TRITON,decode=FLASHINFER", or a mapping of rules. Comes before `attnplug.use(...)`,
    which comes before ATTNPLUG_BACKEND."""
    options: Any
    """Options by backend name, or of the one backend asked for; of a composite's halves by their names. They replace
    those of `attnplug.use(...)` for the same backend, which replace those of ATTNPLUG_OPTIONS."""
    assume_installed: AssumeInstalled
    """"all", or a mapping of distribution to version, to ask for the choice if those, and only those, were
    installed. The answer is "declared", not "usable"."""
    allow_refuted: AllowRefuted
    """Backends that may serve although they gave wrong results on this device with these versions: names, or
    "all". Comes before ATTNPLUG_ALLOW_REFUTED."""
    tuned: Tuned
    """The file of a table that `attnplug tune` wrote, or False for no measured times. Comes before ATTNPLUG_TUNED, which
    comes before the table for the device in the user's data folder, and then the packaged one."""


_UNSET = dict.fromkeys(SelectKwargs.__annotations__)


class Registry:
    """Holds plugins and chooses among the backends they offer. Safe to use from several threads.

    Args:
        plugins: plugin objects by name, or in order (named by their `__name__`); None finds the installed
            ones, attnplug's own among them.

    Raises:
        PolicyError: an environment variable whose value means nothing.
        PluginError: a plugin that did not load, under ATTNPLUG_STRICT or given in `plugins`.
    """

    def __init__(self, plugins: Mapping[str, object] | Iterable[object] | None = None) -> None:
        if plugins is not None and not isinstance(plugins, Mapping):
            try:
                if isinstance(plugins, (str, bytes)):
                    raise TypeError("its items would be letters")
                plugins = tuple(plugins)
            except Exception:  # noqa: BLE001  (`__iter__` is code of the caller)
                limit = "must be a mapping of names to plugins, or a sequence of them"
                raise PluginError(f"plugins={shown(plugins)} {limit}") from None
        self.plugins = PluginSet(plugins)
        """The plugins, and the backends that each name refers to."""
        # Both are reentrant: an interrupt at the end of `with` leaves them held by this thread.
        self._changing, self._lock = threading.RLock(), threading.RLock()
        self._in_change: tuple[int, types.FrameType] | None = None
        self._cache: dict[Any, Decision] = {}
        self._evidence: Evidence | None = None
        self._tuned = TableLookup()

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """One record for each plugin, loaded or not."""
        return self.plugins.records

    @property
    def evidence(self) -> Evidence:
        """The cells refuted on this machine; read once, when first needed."""
        with self._lock:
            if self._evidence is None:
                self._evidence = read_evidence()
                if self._evidence.read_error:
                    _log.warning("evidence is left out: %s", self._evidence.read_error)
            return self._evidence

    def tuned_tables(self, device: DeviceLike = None, tuned: Tuned = None) -> Tables:
        """The tables of measured times that a selection with these arguments reads; each file is read once.

        Raises:
            MatrixFileError: a file that was named is missing or damaged.
        """
        given = self._tuned.of_argument(tuned)
        return self._tuned.for_device(resolve_device(device)) if given is None else given

    def backends(self) -> Mapping[str, type[AttentionBackend]]:
        """The backends that can be chosen automatically, by name; a read-only view."""
        return self.plugins.backends

    def register(self, plugin: object, name: str | None = None) -> PluginRecord:
        """Add a module or object with the hooks of a plugin, through the same checks.

        It replaces a plugin that was registered under the same name. It may also rank.

        Args:
            plugin: the module or object; it states ATTNPLUG_API.
            name: its name; by default its `__name__` or class name.

        Raises:
            PluginError: it does not follow the interface, or offers a name that is taken.
        """
        if name is not None and not isinstance(name, str):
            raise PluginError(f"name={shown(name)} must be text or None")
        return self._change(lambda plugins: plugins.with_plugin(plugin, name))

    def unregister(self, name: str) -> PluginRecord:
        """Remove a plugin that `register` added; returns its record. Decisions made before stay as they are.

        Raises:
            PluginError: no plugin was registered under this name, such as the name of an installed plugin.
        """
        if not isinstance(name, str):
            raise PluginError(f"name={shown(name)} must be text")
        return self._change(lambda plugins: plugins.without_plugin(name))

    def _change(self, change: Callable[[PluginSet], tuple[PluginSet, PluginRecord]]) -> PluginRecord:
        # Held while a plugin's hooks run, so it is not the lock that a selection takes.
        changing = self._in_change
        if not waited(
            lambda seconds: self._changing.acquire(timeout=seconds), lambda: (self._in_change or (None,))[0]
        ):
            text = "another thread registers a plugin that may wait for this thread; try it afterwards"
            raise PluginError(text)
        try:
            # An interrupt may leave an old frame behind, which is in no stack.
            if changing and any(frame is changing[1] for frame, _ in traceback.walk_stack(sys._getframe())):
                raise PluginError("a plugin cannot register plugins while it is registered; do it afterwards")
            try:
                self._in_change = threading.get_ident(), sys._getframe()
                plugins, record = change(self.plugins)
            finally:
                self._in_change = None
            # A plugin can change the choice for any layer, so no remembered decision is kept.
            with self._lock:
                self.plugins, self._cache = plugins, {}
        finally:
            self._changing.release()
        return record

    def select(
        self,
        spec: LayerSpec,
        device: DeviceLike = None,
        phase: Phase | str | None = None,
        *,
        layer_name: str | None = None,
        **kwargs: Unpack[SelectKwargs],
    ) -> Decision:
        """As `attnplug.select`, among the backends of this registry."""
        decision, rule = self._decision(spec, device, phase, layer_name, usable=True, is_whole=True, **kwargs)
        if decision.backend is None:
            raise refusal(decision, rule, self.plugins)
        return decision

    def explain(
        self,
        spec: LayerSpec,
        device: DeviceLike = None,
        phase: Phase | str | None = None,
        *,
        layer_name: str | None = None,
        **kwargs: Unpack[SelectKwargs],
    ) -> Decision:
        """As `attnplug.explain`, among the backends of this registry."""
        return self._decision(spec, device, phase, layer_name, usable=False, is_whole=True, **kwargs)[0]

    def decide(
        self,
        spec: LayerSpec,
        device: DeviceLike = None,
        phase: Phase | None = None,
        *,
        layer_name: str,
        **kwargs: Unpack[SelectKwargs],
    ) -> Decision:
        """As `select`, for a layer of a model, but does not raise for lack of a backend."""
        return self._decision(spec, device, phase, layer_name, usable=True, is_whole=False, **kwargs)[0]

    def select_layers(
        self,
        specs: Mapping[str, LayerSpec],
        device: DeviceLike = None,
        phase: Phase | str | None = None,
        **kwargs: Unpack[SelectKwargs],
    ) -> dict[str, Decision]:
        """As `attnplug.select_layers`, among the backends of this registry."""
        when = None if phase is None else check_member(Phase, "phase", phase)
        decisions = self.decide_layers(specs, device, (when,), **kwargs)[when]
        sets = rule_sets(kwargs.get("backend"))
        for name, decision in decisions.items():
            if when is None:
                _refuse_phase_rule(sets, decision.spec, name)
            if decision.backend is None:
                rule = rule_for(sets, decision.spec, when, name)
                raise refusal(decision, rule, self.plugins)
        return decisions

    def decide_layers(
        self,
        specs: Mapping[str, LayerSpec],
        device: DeviceLike = None,
        phases: Sequence[Phase | None] = (None,),
        *,
        negotiate: bool = True,
        **kwargs: Unpack[SelectKwargs],
    ) -> dict[Phase | None, dict[str, Decision]]:
        """A decision for each phase and each layer, also for layers that no backend serves.

        With `negotiate=False` each decision keeps its own block size and layout. A plan needs that, since
        it uses only some of the decisions.

        Raises:
            SpecError, PolicyError, PluginError, LayoutError: as `attnplug.select_layers`.
        """
        check_layers(specs)
        for rules in rule_sets(kwargs.get("backend")):
            for rule in rules:
                _check_matches(rule, specs)
        where = resolve_device(device)
        phases = [None if phase is None else check_member(Phase, "phase", phase) for phase in phases]
        given: Any = kwargs
        sets, policy = self._asked(given)
        every = {
            (phase, name): self._of_layer(spec, where, phase, name, sets, policy, usable=True)[0]
            for phase in phases
            for name, spec in specs.items()
        }
        if negotiate:
            every = negotiated(every)
            self.check_pages(every.values())
        return {phase: {name: every[phase, name] for name in specs} for phase in phases}

    def check_pages(self, decisions: Iterable[Decision]) -> None:
        """Check that no block size or layout that layers agreed on was refuted here.

        Raises:
            LayoutError: one was; it names the layer, the backend and the evidence.
        """
        for decision in decisions:
            if self.evidence.cells:
                gate = EvidenceGate(self.plugins, self.evidence, decision.allow_refuted, decision.assumed)
                gate.check_pages(decision)

    def _asked(self, kwargs: dict[str, Any]) -> tuple[tuple[tuple[Rule, ...], ...], Policy]:
        """The sets of rules in force here, and the settings without a rule; the same for all layers of a call."""
        # Engines name their table in every call, so this setting alone takes no time to merge.
        tuned = self._tuned.of_argument(kwargs.pop("tuned", None))
        # Callers may pass every setting on, unset ones as None.
        is_set = kwargs and not kwargs.items() <= _UNSET.items()
        # An attribute, because a call takes more of this path, which libraries follow without a project.
        is_set = is_set or Search.folder is not None
        if not (is_set or USE_BLOCKS.get() or os.environ.get(ENVIRONMENT) or os.environ.get(OPTIONS)):
            return (), AUTOMATIC if tuned is None else Policy(tuned=tuned)
        if unknown := kwargs.keys() - _UNSET:
            known = ", ".join(_UNSET)
            raise TypeError(f"unexpected keyword argument {min(unknown)!r}; settings are {known}")
        return self._merged(tuned, **kwargs)

    def _merged(
        self,
        tuned: Tables | None,
        backend: Rules = None,
        options: Any = None,
        assume_installed: AssumeInstalled = None,
        allow_refuted: AllowRefuted = None,
    ) -> tuple[tuple[tuple[Rule, ...], ...], Policy]:
        sets = rule_sets(backend)
        merged = self.environment_options(sets[-2])
        asked_here = ((sets[0], options), *USE_BLOCKS.get())
        # The argument comes last, so that its options replace those of the blocks around it.
        for rules, given in reversed(asked_here):
            only = rules[0].backend if len(rules) == 1 else None
            merged.update(by_backend(given, only, self.plugins))
        check_options(merged, self.plugins)
        assumed, frozen = freeze_assumed(assume_installed), freeze(merged)
        allowed = allowed_names(allow_refuted)
        return sets, Policy(None, frozen, assumed, allowed, tuned, types_within(frozen))

    def environment_options(self, rules: Sequence[Rule]) -> dict[str, Any]:
        """The options in ATTNPLUG_OPTIONS, else in the project's file, by backend; `rules` are those of ATTNPLUG_BACKEND."""
        only = rules[0].backend if len(rules) == 1 else None
        found = parse_options(split_options(os.environ.get(OPTIONS, "")), OPTIONS, only)
        of_project = project_value("options") or {}
        for name in (*found, *of_project):
            if not self.plugins.find(name):
                there, source = ", ".join(self.plugins.names) or "none", OPTIONS if name in found else PROJECT
                raise PolicyError(source, name, f"is not a backend; there are: {there}")
        return {**of_project, **found}

    def _decision(
        self,
        spec: LayerSpec,
        device: DeviceLike,
        phase: Phase | str | None,
        layer_name: str | None,
        *,
        usable: bool,
        is_whole: bool,
        **kwargs: Unpack[SelectKwargs],
    ) -> tuple[Decision, Rule | None]:
        if not isinstance(spec, LayerSpec):
            raise SpecError("spec", spec, "must be a LayerSpec")
        if layer_name is not None and not isinstance(layer_name, str):
            raise PolicyError("layer_name", layer_name, "must be text or None")
        where = resolve_device(device)
        when = phase if phase is None or isinstance(phase, Phase) else check_member(Phase, "phase", phase)
        given: Any = kwargs
        sets, policy = self._asked(given)
        # No layer without a name can match a rule of the argument for a layer.
        for lone in (
            rule for rules in sets[:1] for rule in rules if layer_name is None and rule.scope == "layer"
        ):
            limit = f"is no kind ({', '.join(KINDS)}) and no phase, so it needs layer_name"
            raise PolicyError(lone.source, str(lone), limit)
        # `is_whole`: this one decision is the answer, so without a phase no rule for one phase may be ignored.
        if is_whole and when is None:
            _refuse_phase_rule(sets, spec, layer_name)
        # A bare name in a call for this one layer means it, also where the layer keeps a state.
        named = next((each for each in sets[0] if each.scope == "default"), None) if sets else None
        return self._of_layer(spec, where, when, layer_name, sets, policy, usable=usable, named=named)

    def _of_layer(
        self,
        spec: LayerSpec,
        where: Device,
        when: Phase | None,
        layer_name: str | None,
        sets: tuple[tuple[Rule, ...], ...],
        policy: Policy,
        *,
        usable: bool,
        named: Rule | None = None,
    ) -> tuple[Decision, Rule | None]:
        rule = rule_for(sets, spec, when, layer_name) if sets else None
        rule = named if rule is None else rule
        if rule is not None:
            policy = dataclasses.replace(policy, rule=rule)
        # A plain tuple, since a Placement for each look-up would take 0.5 us more than the 1.3 us of today.
        key = (spec, where, when, policy, usable)
        decision = self._cache.get(key)
        if decision is None:
            decision = self._decide_once(key)
        # An equal spec may have other defaults, and a later replace of the decision's spec follows these.
        if decision.spec is not spec and decision.spec.derived != spec.derived:
            decision = dataclasses.replace(decision, spec=spec)
        if layer_name is not None:
            # The key has no layer name, so that equal layers of a model share one remembered decision.
            decision = dataclasses.replace(decision, layer_name=layer_name)
        return decision, rule

    def _decide_once(self, key: tuple[LayerSpec, Device, Phase | None, Policy, bool]) -> Decision:
        spec, device, phase, policy, usable = key
        # No lock while backends import: they may wait for a module whose import, in another thread, asks here.
        with self._lock:
            plugins, cache = self.plugins, self._cache
        placement = Placement(spec, device, phase)
        tuned = self._tuned.for_device(device) if policy.tuned is None else policy.tuned
        decision = decide(plugins, placement, policy, self.evidence, tuned, usable=usable)
        tries_imports = usable and policy.assumed is None and is_here(device)
        # If another thread still imports the backend, the next call tries again.
        if not (tries_imports and decision.backend is not None and decision.level == "declared"):
            with self._lock:
                if len(cache) >= _MOST_DECISIONS:
                    cache.clear()
                # Another thread may have decided meanwhile. All callers get one and the same decision.
                known = cache.setdefault(key, decision)
            if known is not decision:
                return known
        if usable:
            _log.info("%s", decision)
        return decision


def _refuse_phase_rule(sets: Sequence[tuple[Rule, ...]], spec: LayerSpec, layer_name: str | None) -> None:
    """PolicyError where a choice for both phases would ignore a rule for one of them."""
    rule = phase_rule_for(sets, spec, layer_name)
    if rule is not None:
        limit = "is a rule for one phase, and this choice is for both"
        raise PolicyError(rule.source, str(rule), limit, _PHASE_REMEDY)


def _check_matches(rule: Rule, specs: Mapping[str, LayerSpec]) -> None:
    # A rule for a phase may be meant for another call: `_refuse_phase_rule` has checked it.
    if rule.scope == "phase" or any(rule.matches(spec, None, name) for name, spec in specs.items()):
        return
    remedy = None
    if rule.scope == "layer":
        near = difflib.get_close_matches(rule.pattern, (*KINDS, *Phase), 1)
        remedy = f"did you mean {near[0]}={rule.backend}?" if near else None
    kinds = sorted({kind for spec in specs.values() for kind in spec.kinds})
    limit = f"matches none of {len(specs)} layers (kinds here: {', '.join(kinds) or 'none'})"
    error = PolicyError(rule.source, str(rule), limit, remedy)
    if rule.source not in (ENVIRONMENT, PROJECT):
        raise error
    _log.warning("%s", error)
