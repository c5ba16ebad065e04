"""The cells that the options of `attnplug matrix` choose, by backend, device, feature and id."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnplug.core.errors import PolicyError
from attnplug.matrix.model import Cell, Run

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.registry.plugins.records import Offer


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One backend on one device."""

    name: str
    offer: Offer
    asked: str | None
    device: Device

    def __str__(self) -> str:
        return f"{self.offer.name} on {self.device}"


def pairs_of(backends: Sequence[str] | None, devices: Sequence[str] | None, *, verify: bool) -> list[Pair]:
    """Each backend with each device; None for all backends, and for the current device.

    Raises:
        PolicyError: no backend has a name, or `verify` is set and this machine lacks a device.
        PluginError: the plugin of a backend did not load.
        SpecError: a text names no device.
    """
    from attnplug.registry.default import get_registry
    from attnplug.registry.devices import is_here, resolve_device
    from attnplug.registry.selection.policy import Rule

    plugins = get_registry().plugins
    offers: dict[str, tuple[str, Offer]] = {}
    for name in backends or [offer.name for offer in plugins.offers]:
        found = plugins.resolve(Rule(name, "default", "*", "--backend"))
        for offer in found:
            offers.setdefault(offer.full_name, (name if len(found) == 1 else offer.name, offer))
    where: dict[str, tuple[str | None, Device]] = {}
    asked: Sequence[str | None] = devices or [None]
    for text in asked:
        device = resolve_device(text)
        if verify and not is_here(device):
            remedy = f"leave it out, or name {resolve_device(None)}; without --verify any device is accepted"
            raise PolicyError("--device", text, "is not on this machine, so nothing can run on it", remedy)
        where.setdefault(str(device), (text, device))
    return [
        Pair(name, offer, text, device) for text, device in where.values() for name, offer in offers.values()
    ]


def declared_cells(
    pairs: Sequence[Pair],
    features: Sequence[str],
    only: Sequence[str],
    commit: str | None,
    *,
    sampled_only: bool = False,
) -> tuple[list[Run], list[str]]:
    """The cells of each backend with one of `features` and an id that matches a pattern of `only`; empty for all.

    They are declared or refused. If a pattern matches no sampled cell of a backend, the backend's class answers
    for the combinations that the pattern names.

    Args:
        pairs: the backends and devices.
        features: of FEATURES.
        only: patterns of ids.
        commit: that of the results; None for that of attnplug's checkout.
        sampled_only: whether combinations that are not sampled are left out.

    Returns:
        A run for each pair, and a sentence for each pattern that a backend was asked about.

    Raises:
        PolicyError: a feature is unknown, or a pattern matches no cell.
    """
    from attnplug.matrix.axes import FEATURES
    from attnplug.matrix.design import declare, evaluate

    for name in features:
        if name not in FEATURES:
            raise PolicyError("--feature", name, f"must be one of {', '.join(FEATURES)}")
    runs = [declare(pair.offer, pair.device) for pair in pairs]

    def is_chosen(cell: Cell, patterns: Sequence[str]) -> bool:
        matches = not patterns or any(fnmatch.fnmatchcase(cell.id, pattern) for pattern in patterns)
        return matches and (not features or cell.feature in features)

    chosen = [[each for each in run.findings if is_chosen(each.cell, only)] for run in runs]
    notes = []
    for pattern in only:
        lacking = [
            number
            for number, findings in enumerate(chosen)
            if not any(is_chosen(each.cell, [pattern]) for each in findings)
        ]
        if not lacking:
            continue
        cells, number = ([], 0) if sampled_only else _named_by(pattern, pairs, features)
        if not cells and len(lacking) == len(runs):
            ids = dict.fromkeys(finding.cell.id for run in runs for finding in run.findings)
            raise _unmatched(pattern, number, list(ids), sampled_only)
        for place in lacking if cells else ():
            chosen[place] += evaluate(pairs[place].offer.backend, pairs[place].device, cells)
            what = "this combination" if len(cells) == 1 else f"its {len(cells):,} combinations"
            notes.append(
                f"{pairs[place]}: {pattern} is not sampled; the answer is what the class says of {what}"
            )
    found = [
        dataclasses.replace(run, findings=tuple(findings), commit=commit or run.commit)
        for run, findings in zip(runs, chosen, strict=True)
    ]
    return found, notes


def _named_by(pattern: str, pairs: Sequence[Pair], features: Sequence[str]) -> tuple[list[Cell], int]:
    """The result of `combinations` for the values of all backends together."""
    from attnplug.matrix.axes import axes_of, own_latents
    from attnplug.matrix.design import combinations

    axes: dict[str, list[Any]] = {}
    latents: set[int] = set()
    for backend in dict.fromkeys(pair.offer.backend for pair in pairs):
        latents |= own_latents(backend)
        for axis, values in axes_of(backend).items():
            axes[axis] = list(dict.fromkeys([*axes.get(axis, ()), *values]))
    if features:
        axes["feature"] = [name for name in axes["feature"] if name in features]
    return combinations(pattern, axes, frozenset(latents))


def _unmatched(pattern: str, number: int, ids: Sequence[str], sampled_only: bool) -> PolicyError:
    from attnplug.matrix.design import MOST_COMBINATIONS

    if number > MOST_COMBINATIONS:
        limit = f"names {number:,} combinations, none of them sampled; at most {MOST_COMBINATIONS:,} are evaluated"
        return PolicyError("--only", pattern, limit, "name more of the values")
    if number:
        remedy = "fp8 storage is the feature fp8_kv, and no plain layer has it"
        return PolicyError("--only", pattern, "names values that no layer has together", remedy)
    near = difflib.get_close_matches(pattern, ids, 1, 0.0)
    limit = "matches no sampled cell, and only these are run" if sampled_only else "matches no cell"
    return PolicyError("--only", pattern, limit, f"an id is {near[0]}" if near else None)
