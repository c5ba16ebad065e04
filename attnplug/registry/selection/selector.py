"""Chooses one backend for one layer: gates, then ranking, then a Decision that explains itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnplug._system.text import shortened, shown
from attnplug.core.composite import CompositeBackend
from attnplug.core.composite.steps import StepChoice
from attnplug.core.errors import BackendUnavailableError, NoBackendError, PolicyError
from attnplug.core.interface.answers import answer
from attnplug.core.interface.guarded import describe, guarded_call, plain_list, plain_text
from attnplug.core.mla.backend import MLADecodeBackend
from attnplug.registry.devices import is_here
from attnplug.registry.plugins.options import build_options, options_of, plain_options
from attnplug.registry.selection.decision import Candidate, Decision, Gate, Placement
from attnplug.registry.selection.evidence_gate import EvidenceGate
from attnplug.registry.selection.gates import STILL_IMPORTING, Examined, blame, examine
from attnplug.registry.selection.measured_ranking import Ranked, rank_by_tables

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.reasons import Reason
    from attnplug.core.spec import LayerSpec
    from attnplug.registry.measured.sharing_prices import TablePrices
    from attnplug.registry.measured.tuned_lookup import Tables
    from attnplug.registry.plugin_set import PluginSet
    from attnplug.registry.plugins.installed import Assumed
    from attnplug.registry.plugins.records import Offer
    from attnplug.registry.selection.evidence import Evidence
    from attnplug.registry.selection.policy import Rule


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The settings of the user that a selection depends on, as one hashable value."""

    rule: Rule | None = None
    options: tuple[tuple[str, Any], ...] = ()
    assumed: Assumed = None
    allow_refuted: tuple[str, ...] | None = None
    tuned: Tables | None = None
    option_types: Any = ()
    """The types of the options: 1 and True are equal and have one hash, but are other options."""


AUTOMATIC = Policy()
"""No settings: the ranking decides."""


def decide(
    plugins: PluginSet,
    placement: Placement,
    policy: Policy,
    evidence: Evidence,
    tuned: Tables,
    *,
    usable: bool,
) -> Decision:
    """Check every candidate and choose one. Never raises for lack of a backend.

    Args:
        plugins: the plugins to choose among.
        placement: the layer, device and phase.
        policy: the settings of the user.
        evidence: the cells refuted here.
        tuned: the measured times, which reorder the candidates.
        usable: pass the last gate too, if the device is one of this machine.

    Raises:
        PolicyError, PluginError: a rule, options or names that no backend can follow.
    """
    device = placement.device
    named = None if policy.rule is None else plugins.resolve(policy.rule)
    # A composite or an offer in conflict is examined only if a rule names it.
    offers = dict.fromkeys((*plugins.offers, *(named or ())))
    examined = {offer: examine(offer, placement, policy.assumed) for offer in offers}
    candidates = {offer: each.candidate for offer, each in examined.items()}
    gate = EvidenceGate(plugins, evidence, policy.allow_refuted, policy.assumed)
    notes: list[str] = []
    for offer, candidate in candidates.items():
        if candidate.accepted:
            candidates[offer], note = gate.check(offer, candidate, placement)
            notes += [note] if note else []
    found = _in_order(plugins, examined, candidates, placement, policy, tuned, named)
    order, ranked_by = found.order, found.ranked_by
    notes += found.notes
    winner, level, pages, spec, options = None, "declared", None, placement.spec, None
    winning: type[AttentionBackend] | None = None
    # Only down to the first that imports, because importing a kernel library is slow.
    try_parts = usable and policy.assumed is None and bool(order) and is_here(device)
    for offer in order:
        if named is not None and offer not in named:
            break
        serves = examined[offer]
        reasons = plugins.imports.failure(serves.backend) if try_parts else ()
        if not reasons or reasons is STILL_IMPORTING:
            options, error = guarded_call(_options, offer, serves.backend, policy)
            if error is None:
                winner, level = offer, "usable" if try_parts and not reasons else "declared"
                winning, spec, pages = serves.backend, serves.spec, serves.pages
                break
            # Without options of the user, it is the plugin that changed its mind since it was examined.
            if isinstance(error, PolicyError) and options_of(offer, dict(policy.options)) is not None:
                raise error
            reasons = (blame(offer.backend, error, "its Options"),)
        failed = dataclasses.replace(candidates[offer], refused_at=Gate.IMPORT, reasons=reasons)
        candidates[offer] = failed
    # A backend behind the first, whose parts do not import, did not win by its time.
    measured = found.measured if order and winner is order[0] else None
    automatic = None if winner is None else "rank" if ranked_by else "measured" if measured else "priority"
    of_winner: dict[str, Any] = {}
    if winner is not None:
        of_winner = {"options": options, "backend_cls": winning, "steps": _steps(winning, policy)}
        if winning is not None and issubclass(winning, MLADecodeBackend):
            told, error = guarded_call(answer, winning, "notes", spec)
            notes += [f"{blame(winning, error, 'notes')}; ignored"] if error else told
        if pages is not None:
            of_winner["block_size"], of_winner["kv_cache_layout"] = pages
    return Decision(
        spec=spec,
        device=device,
        phase=placement.phase,
        backend=None if winner is None else winner.name,
        candidates=_listed(plugins, candidates, order, winner, placement.spec),
        level=level,
        chosen_by=automatic if policy.rule is None else policy.rule.source,
        rule=None if policy.rule is None else str(policy.rule),
        ranked_by=ranked_by,
        measured=measured,
        assumed=policy.assumed,
        allow_refuted=gate.allowed,
        notes=(*notes, *([evidence.read_error] if evidence.read_error else [])),
        sharing_prices=None if winner is None else _prices(tuned, placement, winner.name, policy),
        **of_winner,
    )


def _prices(tuned: Tables, placement: Placement, backend: str, policy: Policy) -> TablePrices | None:
    """The prices of shared prefixes of the first table that has some; those of another GPU say nothing here."""
    if tuned.borrowed or placement.spec.direct_kv:
        return None
    for table in tuned.tables:
        if table.is_for(placement.device):
            here = is_here(placement.device)
            found = table.prices_of(placement.spec, backend, here=here, assumed=policy.assumed)
            if found is not None:
                return found
    return None


def _steps(winning: type[AttentionBackend] | None, policy: Policy) -> tuple[StepChoice, ...]:
    """The routes of a composite, which only a rule of the user or of a plan names."""
    if winning is None or not issubclass(winning, CompositeBackend) or policy.rule is None:
        return ()
    why = f"asked for by {policy.rule.source}"
    return tuple(StepChoice(steps, answer(each, "get_name"), why) for steps, each in winning.routes)


def _in_order(
    plugins: PluginSet,
    examined: Mapping[Offer, Examined],
    candidates: dict[Offer, Candidate],
    placement: Placement,
    policy: Policy,
    tuned: Tables,
    named: Collection[Offer] | None,
) -> Ranked:
    """Rank the accepted candidates, and write measured times into them."""
    accepted = sorted(
        ((offer, candidate) for offer, candidate in candidates.items() if candidate.accepted),
        # The name decides between equal priorities, so that the order is always the same.
        key=lambda each: (-(each[1].priority or 0), each[0].full_name),
    )
    order = [offer for offer, _ in accepted]
    # Neither times nor ranking plugins have a say where the user asked for a backend.
    if named is not None:
        order.sort(key=lambda offer: offer not in named)
        return Ranked(order)
    found = Ranked(order)
    if tuned.tables and order:
        pages = [examined[offer].pages for offer in order]
        found = rank_by_tables(tuned, order, pages, placement, policy.assumed)
        for offer, us in found.times:
            candidates[offer].note_time(us)
    order, ranked_by, faults = _ranked(plugins, found.order, placement)
    notes = (*tuned.notes, *found.notes, *faults)
    return Ranked(order, None if ranked_by else found.measured, found.times, notes, tuple(ranked_by))


def _ranked(
    plugins: PluginSet, order: list[Offer], placement: Placement
) -> tuple[list[Offer], list[str], list[str]]:
    """The order after each plugin that may rank, the plugins that gave one, and a note for each fault."""
    ranked_by, notes = [], []
    for name, rank in plugins.rankers():
        before = tuple(offer.name for offer in order)
        question = {"spec": placement.spec, "device": placement.device, "phase": placement.phase}
        names, error = guarded_call(_ranking, rank, question, before)
        if error is not None:
            notes.append(f"{name} raised {describe(error)} in attnplug_rank; ignored")
            continue
        if not names:
            continue  # it leaves the order to others
        unknown = [item for item in names if item not in before]
        if unknown:
            notes.append(f"{name} ranks {shortened(', '.join(unknown))}, no candidate here; ignored")
            continue
        # Names left out get -1 and come last; sorted is stable, so they keep their order.
        place = {item: index for index, item in enumerate(reversed(names))}
        order = sorted(order, key=lambda offer: -place.get(offer.name, -1))
        ranked_by.append(name)
    return order, ranked_by, notes


def _ranking(
    rank: Callable[..., Any], question: Mapping[str, Any], candidates: tuple[str, ...]
) -> list[str] | None:
    """The names that a hook returns, as plain text."""
    wanted = rank(**question, candidates=candidates)
    if wanted is None:
        return None
    if not isinstance(wanted, (list, tuple)):
        return [plain_text(wanted) if isinstance(wanted, str) else shown(wanted)]
    return [plain_text(item) if isinstance(item, str) else shown(item) for item in plain_list(wanted)]


def _listed(
    plugins: PluginSet,
    candidates: Mapping[Offer, Candidate],
    order: Sequence[Offer],
    winner: Offer | None,
    spec: LayerSpec,
) -> tuple[Candidate, ...]:
    """The winner, the other accepted candidates in order, the refused ones, nearest first, and the unavailable ones."""
    first = [candidates[winner]] if winner is not None else []
    accepted = [candidates[o] for o in order if o is not winner and candidates[o].accepted]
    refused = sorted(
        (candidate for candidate in candidates.values() if not candidate.accepted),
        key=lambda candidate: (*_distance(candidate, spec), -(candidate.priority or 0), candidate.name),
    )
    listed = {offer.full_name for offer in candidates}
    unavailable = (candidate for candidate in plugins.unavailable if candidate.name not in listed)
    return (*first, *accepted, *refused, *unavailable)


_PACKAGE, _CHOICE, _LAYER, _DEVICE, _FAULT = range(5)
_FAR = {
    **dict.fromkeys(("not_installed", "version"), _PACKAGE),
    **dict.fromkeys(("block_size", "dtype", "kv_cache_dtype", "kv_cache_layout", "phase"), _CHOICE),
    **dict.fromkeys(("policy", "refuted"), _CHOICE),
    **dict.fromkeys(("compute_capability", "device_type"), _DEVICE),
    **dict.fromkeys(("api_version", "blocked", "conflict", "import_failed", "plugin_error"), _FAULT),
}
"""The distance of a refused candidate from serving, by the code of a reason; needs of a layer are between."""


def _distance(candidate: Candidate, spec: LayerSpec) -> tuple[int, int]:
    """The farthest of the reasons against a candidate, and their number."""
    # The nearest candidate is listed first.
    # A combination with a cache dtype or a block size that the user gave may be served with another one.
    combined = _LAYER if spec.kv_cache_dtype == "auto" and spec.block_size is None else _CHOICE
    far = {**_FAR, "combination": combined}
    return max((far.get(code, _LAYER) for code in candidate.codes), default=_FAULT), len(candidate.codes)


def _options(
    winner: Offer, serving: type[AttentionBackend], policy: Policy
) -> tuple[tuple[str, Any], ...] | None:
    built = build_options(serving, options_of(winner, dict(policy.options)))
    return None if built is None else plain_options(built)


def refusal(decision: Decision, rule: Rule | None, plugins: PluginSet) -> NoBackendError:
    """The error to raise for a decision without a backend, made under `rule`."""
    layer = f"layer {decision.layer_name}" if decision.layer_name else "this layer"
    where = f"{layer} on {decision.device}" + (f" in {decision.phase}" if decision.phase else "")
    if rule is None:
        lines = decision.explanation().replace("\n", "\n  ")
        return NoBackendError(f"no backend serves {where}\n  {lines}", decision)
    reasons: list[Reason] = []
    lines = ""
    asked = {offer.name for offer in plugins.find(rule.backend)}
    for candidate in decision.refused:
        if candidate.name in asked:
            reasons += candidate.reasons
            # Faults of a plugin are long sentences, each for one place of its source.
            between = "\n    " if "plugin_error" in candidate.codes else "; "
            lines += f"\n  {candidate.name}: {between.join(candidate.reasons)}"
    message = f"{rule.backend}, asked for by {rule.source}, does not serve {where}{lines}"
    return BackendUnavailableError(message, decision, reasons)
