"""Chooses one backend for one layer: gates, then ranking, then a Decision that explains itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnplug.core.errors import BackendUnavailableError, NoBackendError
from attnplug.registry.decision import Candidate, Decision
from attnplug.registry.devices import is_here
from attnplug.registry.evidence_gate import Question, Scales
from attnplug.registry.gates import examine, preferred_pages, refuse_import
from attnplug.registry.options import build_options, options_of
from attnplug.registry.plugin_calls import describe, guarded_call

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.reasons import Reason
    from attnplug.core.spec import LayerSpec, Phase
    from attnplug.registry.evidence import Evidence
    from attnplug.registry.installed import Assumed
    from attnplug.registry.plugins import PluginSet
    from attnplug.registry.policy import Rule
    from attnplug.registry.records import Offer

__all__ = ["AUTOMATIC", "Policy", "decide", "refusal"]


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Everything but spec, device and phase that a selection depends on."""

    rule: Rule | None = None
    options: tuple[tuple[str, Any], ...] = ()
    assumed: Assumed = None
    allow_refuted: tuple[str, ...] | None = None


AUTOMATIC = Policy()
"""Nothing was asked: ranking decides."""


def decide(
    plugins: PluginSet,
    spec: LayerSpec,
    device: Device,
    phase: Phase | None,
    policy: Policy,
    evidence: Evidence,
    *,
    usable: bool,
) -> Decision:
    """Judge every candidate and choose. Never raises for lack of a backend.

    Args:
        plugins: the plugins to choose among.
        spec: the layer.
        device: the device it runs on.
        phase: the phase, or None for both.
        policy: what the user asked for.
        evidence: what was wrong when it was run here.
        usable: whether the last gate is to be passed, where the device is of this machine.

    Raises:
        PolicyError, PluginError: a rule, options or names that cannot be followed by anybody.
    """
    asked = None if policy.rule is None else plugins.resolve(policy.rule)
    offers = dict.fromkeys((*plugins.offers, *(asked or ())))
    judged = {offer: examine(offer, spec, device, phase, policy.assumed) for offer in offers}
    scales = Scales(plugins, evidence, policy.allow_refuted)
    notes = _weighed(scales, judged, Question(spec, device, phase, policy.assumed))
    order = sorted(
        (offer for offer, candidate in judged.items() if candidate.accepted),
        key=lambda offer: (-(judged[offer].priority or 0), offer.full_name),
    )
    ranked_by: tuple[str, ...] = ()
    if asked is None:
        order, ranked_by, faults = _ranked(plugins, order, spec, device, phase)
        notes += faults
    else:
        order.sort(key=lambda offer: offer not in asked)
    winner, level = None, "declared"
    try_parts = usable and policy.assumed is None and bool(order) and is_here(device)
    for offer in order:
        if asked is not None and offer not in asked:
            break
        reason = plugins.import_failure(offer.backend) if try_parts else None
        if reason is None:
            winner, level = offer, "usable" if try_parts else "declared"
            break
        judged[offer] = refuse_import(judged[offer], reason)
    return Decision(
        spec=spec,
        device=device,
        phase=phase,
        backend=None if winner is None else winner.name,
        candidates=_listed(plugins, judged, order, winner),
        level=level,
        chosen_by=_settled_by(policy, ranked_by, winner),
        rule=None if policy.rule is None else str(policy.rule),
        ranked_by=ranked_by,
        options=None if winner is None else _options(winner, policy),
        assumed=policy.assumed,
        allow_refuted=scales.allowed,
        notes=(*notes, *([evidence.read_error] if evidence.read_error else [])),
        backend_cls=None if winner is None else winner.backend,
        **({} if winner is None else _paged(winner.backend, spec, device)),
    )


def _weighed(scales: Scales, judged: dict[Offer, Candidate], asked: Question) -> tuple[str, ...]:
    """Refuse what was refuted, in place; a note for each candidate that the user wants all the same."""
    notes = []
    for offer, candidate in judged.items():
        if candidate.accepted:
            judged[offer], note = scales.weigh(offer, candidate, asked)
            notes += [note] if note else []
    return tuple(notes)


def _ranked(
    plugins: PluginSet,
    order: list[Offer],
    spec: LayerSpec,
    device: Device,
    phase: Phase | None,
) -> tuple[list[Offer], tuple[str, ...], tuple[str, ...]]:
    """The order after each plugin that may rank was asked, who changed it, and what went wrong."""
    ranked_by, notes = [], []
    for name, rank in plugins.rankers():
        before = tuple(offer.name for offer in order)
        wanted, error = guarded_call(rank, spec=spec, device=device, phase=phase, candidates=before)
        if error is not None:
            notes.append(f"{name} raised {describe(error)} in attnplug_rank; ignored")
            continue
        if wanted is None:
            continue
        names = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
        unknown = [str(item) for item in names if item not in before]
        if unknown:
            notes.append(f"{name} ranks {', '.join(unknown)}, no candidate here; ignored")
            continue
        ranked_by.append(name)
        place = {item: index for index, item in enumerate(reversed(names))}
        order = sorted(order, key=lambda offer: -place.get(offer.name, -1))
    return order, tuple(ranked_by), tuple(notes)


def _settled_by(policy: Policy, ranked_by: tuple[str, ...], winner: Offer | None) -> str | None:
    if policy.rule is not None:
        return policy.rule.source
    if winner is None:
        return None
    return "rank" if ranked_by else "priority"


def _listed(
    plugins: PluginSet,
    judged: Mapping[Offer, Candidate],
    order: Sequence[Offer],
    winner: Offer | None,
) -> tuple[Candidate, ...]:
    first = [judged[winner]] if winner is not None else []
    accepted = [judged[o] for o in order if o is not winner and judged[o].accepted]
    refused = sorted(
        (candidate for candidate in judged.values() if not candidate.accepted),
        key=lambda candidate: (-(candidate.priority or 0), candidate.name),
    )
    named = {offer.full_name for offer in judged}
    out = (candidate for candidate in plugins.unavailable if candidate.name not in named)
    return (*first, *accepted, *refused, *out)


def _options(winner: Offer, policy: Policy) -> tuple[tuple[str, Any], ...] | None:
    built = build_options(winner.backend, options_of(winner, dict(policy.options)))
    if built is None:
        return None
    return tuple(sorted((f.name, getattr(built, f.name)) for f in dataclasses.fields(built) if f.init))


def _paged(backend: type[AttentionBackend], spec: LayerSpec, device: Device) -> dict[str, Any]:
    preferred = preferred_pages(backend, spec, device)
    return {} if preferred is None else dict(zip(("block_size", "kv_cache_layout"), preferred, strict=True))


def refusal(decision: Decision, rule: Rule | None, plugins: PluginSet) -> NoBackendError:
    """The error to raise for a decision without a backend, made under `rule` among `plugins`."""
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
            lines += f"\n  {candidate.name}: {'; '.join(candidate.reasons)}"
    message = f"{rule.backend}, asked for by {rule.source}, does not serve {where}{lines}"
    return BackendUnavailableError(message, decision, reasons)
