"""The cells that the options of `attnplug matrix` choose, by backend, device, feature and id."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnplug.core.errors import PolicyError
from attnplug.matrix.model import Cell, Run

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.registry.records import Offer


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
    from attnplug.registry.policy import Rule

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
    pairs: Sequence[Pair], features: Sequence[str], only: Sequence[str], commit: str | None
) -> list[Run]:
    """The cells of each backend with one of `features` and an id that matches a pattern of `only`; empty for all.

    They are declared or refused. `commit` is that of the results; None for that of attnplug's checkout.

    Raises:
        PolicyError: a feature is unknown, or a pattern matches no cell.
    """
    from attnplug.matrix.axes import FEATURES
    from attnplug.matrix.declared import declare

    for name in features:
        if name not in FEATURES:
            raise PolicyError("--feature", name, f"must be one of {', '.join(FEATURES)}")
    runs = [declare(pair.offer, pair.device) for pair in pairs]
    ids = dict.fromkeys(finding.cell.id for run in runs for finding in run.findings)
    for pattern in only:
        if not fnmatch.filter(ids, pattern):
            near = difflib.get_close_matches(pattern, ids, 1, 0.0)
            raise PolicyError("--only", pattern, "matches no cell", f"an id is {near[0]}" if near else None)

    def is_chosen(cell: Cell) -> bool:
        matches = not only or any(fnmatch.fnmatchcase(cell.id, pattern) for pattern in only)
        return matches and (not features or cell.feature in features)

    return [
        dataclasses.replace(
            run,
            findings=tuple(each for each in run.findings if is_chosen(each.cell)),
            commit=commit or run.commit,
        )
        for run in runs
    ]
