"""Which cells `attnplug matrix` is about: the backends, devices and ids that its options name."""

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

__all__ = ["Pair", "declared_cells", "pairs_of"]


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
    """Each backend asked for on each device asked for; None asks for all backends, for the current device.

    Raises:
        PolicyError: a name that no backend has, or a device that is not here, where cells are to be run.
        PluginError: the plugin asked for did not load.
        SpecError: text that names no device.
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
            remedy = f"leave it out, or name {resolve_device(None)}; without --verify any device can be asked"
            raise PolicyError("--device", text, "is not of this machine, so nothing can be run on it", remedy)
        where.setdefault(str(device), (text, device))
    return [
        Pair(name, offer, text, device) for text, device in where.values() for name, offer in offers.values()
    ]


def declared_cells(
    pairs: Sequence[Pair], features: Sequence[str], only: Sequence[str], commit: str | None
) -> list[Run]:
    """What each backend declares, of the cells that were asked for.

    Args:
        pairs: backends on devices.
        features: only cells of these; all where there are none.
        only: patterns of ids, one of which must match; none lets all pass.
        commit: what the cells are of; default that of attnplug's checkout.

    Raises:
        PolicyError: a feature that is none, or a pattern that matches no cell.
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
            raise PolicyError("--only", pattern, "matches no cell", f"ids are as {near[0]}" if near else None)

    def is_asked(cell: Cell) -> bool:
        matches = not only or any(fnmatch.fnmatchcase(cell.id, pattern) for pattern in only)
        return matches and (not features or cell.feature in features)

    return [
        dataclasses.replace(
            run,
            findings=tuple(each for each in run.findings if is_asked(each.cell)),
            commit=commit or run.commit,
        )
        for run in runs
    ]
