"""The plugins of one registry, and the backends that a name refers to."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attnplug._system.text import shown
from attnplug.core.composite import CompositeBackend, composite_backend
from attnplug.core.composite.steps import StepRange, split_routes
from attnplug.core.errors import PluginError, PolicyError, SpecError, UnknownBackendError
from attnplug.core.interface.guarded import class_name, describe, guarded_call, plain_text
from attnplug.registry.plugins.discovery import Host, Loaded, installed_plugins
from attnplug.registry.plugins.records import COMPOSITE_SEPARATOR, Offer, PluginRecord, PluginStatus, joined
from attnplug.registry.plugins.switches import ALLOW_REFUTED, STRICT, Switches
from attnplug.registry.selection.gates import PartImports, conflicting, not_loaded

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.registry.selection.decision import Candidate
    from attnplug.registry.selection.policy import Rule


class PluginSet:
    """The plugins of a registry: their records, their offers, and the names of backends.

    Args:
        plugins: as `Registry` takes them.

    Raises:
        PolicyError, PluginError: as `Registry` raises them.
    """

    def __init__(self, plugins: Mapping[str, object] | Iterable[object] | None = None) -> None:
        self._host = Host()
        self._loaded: dict[str, Loaded] = {}
        self._in_code: list[str] = []
        self.imports = PartImports()
        """The last gate, remembered: whether the parts of each backend import here."""
        self._switches = Switches.read()
        self.allow_refuted = self._switches.allow_refuted
        """The names in ATTNPLUG_ALLOW_REFUTED."""
        self.allow_refuted_source = self._switches.source(ALLOW_REFUTED)
        if plugins is None:
            self._discover()
        elif isinstance(plugins, Mapping):
            for name, plugin in plugins.items():
                # Names that are equal as text would replace each other.
                if not isinstance(name, str) or not name:
                    raise PluginError(f"the name {shown(name)} of a plugin must be text, and not empty")
                self._register(plugin, plain_text(name))
        else:
            for plugin in plugins:
                title = _default_name(plugin)
                # With a number if another one has the name, so that neither replaces the other.
                names = itertools.chain((title,), (f"{title}-{number}" for number in itertools.count(2)))
                self._register(plugin, next(each for each in names if each not in self._loaded))
        self._index()
        # The user left out blocked plugins on purpose, so strict mode accepts them.
        kept = (PluginStatus.LOADED, PluginStatus.BLOCKED)
        bad = [record.reason or record.name for record in self.records if record.status not in kept]
        if bad and self._switches.strict:
            source = self._switches.source(STRICT)
            where = f"{STRICT} is set" if source == STRICT else f"{source} sets strict"
            raise PluginError(f"{where} and plugins did not load: " + "; ".join(bad))

    def _discover(self) -> None:
        found = installed_plugins()
        # Checked before any plugin is imported, so that a misspelt name raises at once.
        self._switches.check_names([plugin.record for plugin in found])
        for plugin in found:
            variable = self._switches.blocked_by(plugin.record, plugin.is_builtin)
            if variable is None:
                loaded = self._host.load(plugin)
            else:
                reason = f"{plugin.record.name} is left out by {variable}"
                loaded = Loaded(dataclasses.replace(plugin.record, reason=reason))
            self._loaded[plugin.record.name] = loaded

    def with_plugin(self, plugin: object, name: str | None = None) -> tuple[PluginSet, PluginRecord]:
        """A copy with one more plugin object, and its record; see `Registry.register`.

        This set stays as it is, so that a selection in another thread sees either all of the change or none.
        """
        made = self._copy()
        return made, made._register(plugin, name)

    def without_plugin(self, name: str) -> tuple[PluginSet, PluginRecord]:
        """A copy without a plugin that was registered in code, and its record.

        Raises:
            PluginError: no plugin was registered under this name.
        """
        if name not in self._in_code:
            known = ", ".join(self._in_code) or "none"
            raise PluginError(f"{name} was not registered in this process; registered plugins are {known}")
        made = self._copy()
        loaded = made._loaded.pop(name)
        made._in_code.remove(name)
        made._host.forget(loaded.plugin)
        made._index()
        return made, loaded.record

    def _copy(self) -> PluginSet:
        made = copy.copy(self)
        made._host, made._loaded, made._in_code = self._host.copy(), dict(self._loaded), list(self._in_code)
        # The parts of a plugin that is registered again may import by now.
        made.imports = self.imports.under_way()
        return made

    def _register(self, plugin: object, name: str | None = None) -> PluginRecord:
        title = name or _default_name(plugin)
        if title in self._loaded and title not in self._in_code:
            raise PluginError(f"{title} is the name of an installed plugin; give another name")
        replaced = self._loaded.pop(title, None)
        if replaced is not None:
            self._host.forget(replaced.plugin)
        loaded = self._host.check_and_load(PluginRecord(title, None, None, PluginStatus.BLOCKED), plugin)
        if loaded.record.status is not PluginStatus.LOADED:
            raise PluginError(str(loaded.record.reason))
        taken = {offer.name: offer for offer in self.every_offer}
        for offer in loaded.offers:
            if offer.name in taken:
                rival = taken[offer.name].plugin
                raise PluginError(f"{title} offers {offer.name}, which {rival} offers already")
        self._loaded[title] = loaded
        # A plugin that replaces another ranks last, as it comes last among the records.
        self._in_code = [*(other for other in self._in_code if other != title), title]
        self._index()
        return loaded.record

    def _index(self) -> None:
        """Derive names, conflicts and unavailable candidates from the loaded plugins."""
        by_name: dict[str, list[Offer]] = {}
        for loaded in self._loaded.values():
            for offer in loaded.offers:
                by_name.setdefault(offer.name, []).append(offer)
        self._conflicts = {name: rivals for name, rivals in by_name.items() if len(rivals) > 1}
        for rivals in self._conflicts.values():
            for offer in rivals:
                self._mark_conflict(offer, rivals)
        self.offers = tuple(rivals[0] for rivals in by_name.values() if len(rivals) == 1)
        """The backends that can be chosen automatically."""
        self.backends: Mapping[str, type[AttentionBackend]]
        self.backends = MappingProxyType({offer.name: offer.backend for offer in self.offers})
        """The same by name; a read-only view."""
        self.unavailable = (
            *(conflicting(o, rivals) for rivals in self._conflicts.values() for o in rivals),
            *(not_loaded(record) for record in self._not_loaded()),
        )
        """A candidate for each plugin that did not load, and for each offer in conflict."""

    def _not_loaded(self) -> list[PluginRecord]:
        # A loaded plugin may have no offers, and one in conflict can still be chosen by its full name.
        entries = (entry for entry in self._loaded.values() if not entry.offers)
        return [entry.record for entry in entries if entry.record.status is not PluginStatus.LOADED]

    def _mark_conflict(self, offer: Offer, rivals: Sequence[Offer]) -> None:
        loaded = self._loaded[offer.plugin]
        others = ", ".join(rival.plugin for rival in rivals if rival.plugin != offer.plugin)
        reason = (
            f"{offer.plugin} offers {offer.name}, and so does {others}: "
            f"neither is chosen automatically; ask for {offer.full_name}"
        )
        record = dataclasses.replace(loaded.record, status=PluginStatus.CONFLICT, reason=reason)
        self._loaded[offer.plugin] = dataclasses.replace(loaded, record=record)

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """One record for each plugin, loaded or not."""
        return tuple(self._with_rank_note(loaded.record) for loaded in self._loaded.values())

    def _with_rank_note(self, record: PluginRecord) -> PluginRecord:
        if record.status is not PluginStatus.LOADED or record.name in self._in_code:
            return record
        named = any(map(record.answers_to, self._switches.rank))
        if named or not self._host.has_hook("attnplug_rank", self._loaded[record.name].plugin):
            return record
        note = f"{record.name} has a hook attnplug_rank that is not called: ATTNPLUG_RANK does not name it"
        return dataclasses.replace(record, reason=f"{record.reason}; {note}" if record.reason else note)

    @property
    def every_offer(self) -> tuple[Offer, ...]:
        """All backends of loaded plugins, those in conflict included."""
        return tuple(offer for loaded in self._loaded.values() for offer in loaded.offers)

    @property
    def names(self) -> list[str]:
        """The names of all backends and families, sorted."""
        families = {o.declared.family for o in self.every_offer if o.declared.family}
        return sorted({offer.name for offer in self.every_offer} | families)

    def rankers(self) -> list[tuple[str, Callable[..., Any]]]:
        """The plugins that may reorder candidates: those named in ATTNPLUG_RANK, then registered ones."""
        named = [r for n in self._switches.rank for r in self.records if r.answers_to(n)]
        in_code = [self._loaded[name].record for name in self._in_code]
        return [
            (record.name, functools.partial(self._host.call, "attnplug_rank", plugin))
            for record in dict.fromkeys((*named, *in_code))
            if record.status is PluginStatus.LOADED
            and self._host.has_hook("attnplug_rank", plugin := self._loaded[record.name].plugin)
        ]

    def resolve(self, rule: Rule) -> tuple[Offer, ...]:
        """The offers that a rule names: a backend, a family's members, or "PREFILL+DECODE".

        Raises:
            PolicyError: three names joined, or more; an empty half; routes of another form.
            PluginError: the plugin named did not load, or the name is in conflict.
            UnknownBackendError: no plugin offers the name; it suggests near ones.
        """
        name = rule.backend
        if "[" in name:
            name = self._resolved_routes(rule)
        if COMPOSITE_SEPARATOR in name:
            halves = name.split(COMPOSITE_SEPARATOR)
            if len(halves) != 2:
                limit = f"names {len(halves)} backends; a composite has two"
                raise PolicyError(rule.source, name, limit, "write PREFILL+DECODE")
            if not all(half.strip() for half in halves):
                raise PolicyError(rule.source, name, "has an empty half", "write PREFILL+DECODE")
            # Each half is resolved alone, so that an error names the half at fault.
            for half in halves:
                self.resolve(dataclasses.replace(rule, backend=half.strip()))
        found = self.find(rule.backend)
        if found:
            return found
        if name in self._conflicts:
            choices = " or ".join(offer.full_name for offer in self._conflicts[name])
            raise PluginError(f"{name} is offered by more than one distribution; ask for {choices}")
        for record in self._not_loaded():
            if record.answers_to(name):
                raise PluginError(f"{name}, asked for by {rule.source}, did not load: {record.reason}")
        names = self.names
        near = difflib.get_close_matches(name.upper(), names, 3, 0.5)
        limit = f"is not a backend; loaded are {', '.join(names) or 'none'}"
        failed = [str(record.reason) for record in self._not_loaded()]
        if failed:
            limit += f"; not loaded: {'; '.join(failed)}"
        remedy = f"did you mean {' or '.join(near)}?" if near else None
        raise UnknownBackendError(rule.source, name, limit, remedy)

    def find(self, name: str) -> tuple[Offer, ...]:
        """The offers called `name`: a backend, a family's members, or `name@distribution`; () for none.

        "PREFILL+DECODE" gives a composite for each pair of the halves' offers, and "PREFILL+DECODE[draft on NAME]" one
        with routes; see `composite_backend`.
        """
        if COMPOSITE_SEPARATOR in name:
            try:
                name, routes = split_routes(name)
            except SpecError:
                return ()
            halves = [self.find(half.strip()) for half in name.split(COMPOSITE_SEPARATOR)]
            others = [(steps, self.find(member)) for steps, member in routes]
            if len(halves) != 2 or not all(offers for _, offers in others):
                return ()
            # A family's first member serves the steps of a route.
            routed = tuple((steps, offers[0]) for steps, offers in others)
            pairs = itertools.product(*halves)
            return tuple(dict.fromkeys(self._pair(prefill, decode, routed) for prefill, decode in pairs))
        if "@" in name:
            backend, _, owner = name.partition("@")
            return tuple(
                offer
                for offer in self.every_offer
                if offer.name == backend and self._loaded[offer.plugin].record.is_owned_by(owner)
            )
        named = tuple(offer for offer in self.offers if offer.name == name)
        return named or tuple(offer for offer in self.offers if offer.declared.family == name)

    def refers_to(self, name: str, candidate: Candidate) -> bool:
        """Whether the candidate is one of the backends that `name` refers to."""
        wanted = (candidate.name, candidate.distribution)
        return any((offer.name, offer.distribution) == wanted for offer in self.find(name))

    def offer_of(self, candidate: Candidate) -> Offer | None:
        """The offer that a candidate stands for; None for a composite and for a plugin that did not load."""
        wanted = (candidate.name, candidate.distribution)
        return next((each for each in self.offers if (each.name, each.distribution) == wanted), None)

    def _resolved_routes(self, rule: Rule) -> str:
        """The halves of a rule with routes, whose members are backends here; errors as `resolve`."""
        try:
            halves, routes = split_routes(rule.backend)
        except SpecError as problem:
            raise PolicyError(rule.source, rule.backend, problem.limit, problem.remedy) from None
        if COMPOSITE_SEPARATOR not in halves:
            raise PolicyError(rule.source, rule.backend, "has routes and one half", "write A+B[draft on A]")
        for _, member in routes:
            if COMPOSITE_SEPARATOR in member:
                raise PolicyError(rule.source, rule.backend, f"has a route on {member}", "name one backend")
            self.resolve(dataclasses.replace(rule, backend=member))
        return halves

    @staticmethod
    def _pair(prefill: Offer, decode: Offer, routes: Sequence[tuple[StepRange, Offer]] = ()) -> Offer:
        both = dict.fromkeys((prefill, decode, *(offer for _, offer in routes)))
        members = tuple((steps, offer.backend) for steps, offer in routes)
        backend, error = guarded_call(composite_backend, prefill.backend, decode.backend, members)
        if error is not None:
            names = "+".join(offer.name for offer in both)
            raise PluginError(f"{names} cannot be made: {describe(error)}") from error
        if not issubclass(backend, CompositeBackend):
            return prefill
        return Offer(
            backend.get_name(),
            backend,
            str(joined(offer.plugin for offer in both)),
            joined(offer.distribution for offer in both),
            joined(offer.version for offer in both),
        )


def _default_name(plugin: object) -> str:
    named, _ = guarded_call(lambda: plain_text(plugin.__name__))  # type: ignore[attr-defined]
    return named or class_name(type(plugin))
