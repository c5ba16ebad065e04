"""The checks of a named backend, and the reasons why they cannot run on this machine."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplug.core.backend import AttentionBackend
from attnplug.core.device import Device
from attnplug.core.errors import BackendUnavailableError, PolicyError, SpecError
from attnplug.core.interface.answers import declared
from attnplug.core.spec import LayerSpec
from attnplug.registry.default import get_registry
from attnplug.registry.devices import is_here, resolve_device
from attnplug.registry.plugins.installed import missing_requirements
from attnplug.registry.plugins.options import (
    build_options,
    by_backend,
    check_options,
    freeze,
    options_of,
    parse_options,
)
from attnplug.registry.plugins.project import PROJECT, project_value
from attnplug.registry.plugins.waiting import describe, guarded_call
from attnplug.registry.selection.gates import import_parts
from attnplug.registry.selection.policy import Rule
from attnplug.testing.conformance.cases.designed_cases import Designs
from attnplug.testing.conformance.check import Check, Level
from attnplug.testing.conformance.check_filter import checked_reasons, known_reasons, read_known_failures
from attnplug.testing.conformance.listing import target_checks
from attnplug.testing.conformance.target import Target

if TYPE_CHECKING:
    from attnplug.registry.plugins.records import Offer


@dataclasses.dataclass(frozen=True, slots=True)
class Suite:
    """Every check of one backend on one device, and by id the reason of each that is known to fail."""

    offer: Offer
    device: Device
    level: Level
    checks: tuple[Check, ...]
    known: Mapping[str, str]
    options: Any = None
    """The options of the backend's layers; None for its defaults."""

    @property
    def ids(self) -> list[str]:
        """The ids of the checks."""
        return [check.id for check in self.checks]


def load_suite(
    name: str,
    *,
    device: str | None = None,
    level: Level | str = Level.SMOKE,
    known_failures: Path | None = None,
    source: str = "NAME",
    checks_of: str | None = None,
    only: Iterable[str] = ("*",),
    options: Sequence[str] = (),
    designs: Designs | None = None,
) -> Suite:
    """The checks of an installed or registered backend.

    Args:
        name: as `attnplug.select` takes it: a backend, or `name@distribution`.
        device: "cpu", "cuda:1", ...; default the current one. A numbered GPU becomes torch's current one.
        level: "smoke" or "full".
        known_failures: a TOML file; an id in it may belong to either level.
        source: the option or argument that gave the name, for messages.
        checks_of: "module:function" that lists the checks of a Target; default the kit's checks.
        only: patterns of the wanted ids; other checks of the kit may be left out of the suite to save time.
        options: texts of `--option`, which replace those of ATTNPLUG_OPTIONS for the same backend.
        designs: keeps the designed cases, and has those that another process has found.

    Raises:
        PolicyError: an unknown name, a family's name, a known failure that matches no check, or no function; an
            option that the backend does not have or refuses.
        PluginError: the backend's plugin did not load.
        BackendUnavailableError: a requirement is missing, an import fails, or the device is unsupported.
        SpecError: an unknown device or level.
    """
    offer = find_backend(name, source)
    where = resolve_device(device)
    reasons = refusals(offer.backend, where)
    if reasons:
        raise BackendUnavailableError(f"{offer.name} does not run here on {where}: {'; '.join(reasons)}")
    _make_current(device)
    # A known failure may belong to any check.
    of_project = (project_value("known-failures") or {}).get(offer.name) if checks_of is None else None
    wanted = tuple(only) if known_failures is None and not of_project else ("*",)
    # Other checks, such as cells of the matrix, are of the defaults.
    given = _options_of(offer, name, options) if checks_of is None or options else None
    checks_at = _checks_function(
        checks_of, Target(offer.backend, where, options=given, designs=designs), wanted
    )
    checks = checks_at(level)
    chosen = Level(level)
    known: dict[str, str] = {}
    if known_failures is not None or of_project:
        other = Level.FULL if chosen is Level.SMOKE else Level.SMOKE
        known = known_reasons(
            checked_reasons(of_project or {}, f"{PROJECT}: known-failures")
            if known_failures is None
            else read_known_failures(known_failures),
            [check.id for check in checks],
            source=PROJECT if known_failures is None else f"--known-failures {known_failures}",
            elsewhere=lambda: [check.id for check in checks_at(other)],
        )
    return Suite(offer, where, chosen, tuple(checks), known, given)


def _options_of(offer: Offer, name: str, texts: Sequence[str]) -> Any:
    """The options in `texts` and in ATTNPLUG_OPTIONS for a backend; None if there are none for it."""
    registry = get_registry()
    asked = by_backend(parse_options(texts, "--option", name), None, registry.plugins) if texts else {}
    merged = registry.environment_options([Rule(name, "default", "*", "NAME")]) | asked
    check_options(merged, registry.plugins)
    given = options_of(offer, dict(freeze(merged)))
    for text in texts:
        # Options in the environment may be meant for other processes, and these are not.
        if options_of(offer, parse_options([text], "--option", name)) is None:
            raise PolicyError("--option", text, f"is for another backend, and {offer.name} is checked")
    return None if given is None else build_options(offer.backend, given)


def _checks_function(
    checks_of: str | None, target: Target, only: Iterable[str]
) -> Callable[[Level | str], list[Check]]:
    """A function of a level that lists the checks: the kit's, or the named one; PolicyError if there is none."""
    if checks_of is None:
        return lambda level: target_checks(dataclasses.replace(target, level=Level.read(level)), only)
    try:
        function = pkgutil.resolve_name(checks_of)
    except (ImportError, AttributeError, ValueError) as problem:
        raise PolicyError("--attn-checks", checks_of, f"names no function: {problem}") from None
    return lambda level: list(function(dataclasses.replace(target, level=Level(level))))


def find_backend(name: str, source: str) -> Offer:
    """The one backend called `name`.

    Raises:
        PolicyError: the name is unknown, or of a family; the error lists the known names.
        PluginError: the backend's plugin did not load.
    """
    offers = get_registry().plugins.resolve(Rule(name, "default", "*", source))
    first, *others = offers
    if others:
        members = ", ".join(offer.name for offer in offers)
        raise PolicyError(source, name, "is a family of backends", f"name one: {members}")
    return first


def refusals(backend: type[AttentionBackend], device: Device) -> list[str]:
    """Why `backend` cannot be checked on `device`; empty if it can."""
    if not is_here(device):
        return [f"this machine has no {device}, its device is {Device.current()}"]
    missing = [str(reason) for reason in missing_requirements(declared(backend, "requires"))]
    # A device's reasons are the same for every layer.
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=64)
    found, problem = guarded_call(backend.validate_configuration, layer, device)
    if problem is not None:
        return [f"validate_configuration raised {describe(problem)}", *missing]
    # Only composites give the last: for any layer, their halves disagree about the cache layout.
    codes = ("device_type", "compute_capability", "kv_cache_layout")
    lacking = [str(reason) for reason in found if getattr(reason, "code", None) in codes]
    if lacking or missing:
        return [*lacking, *missing]
    return [str(reason) for reason in import_parts(backend)]


def _make_current(device: str | None) -> None:
    """Make "cuda:1" torch's current GPU: a Device has no number, and tensors are made on the current GPU."""
    kind, _, number = (device or "").strip().partition(":")
    if kind in ("cuda", "rocm") and number.isdigit():
        import torch

        try:
            torch.cuda.set_device(int(number))
        except (RuntimeError, AssertionError) as problem:  # pragma: no cover - resolve_device checks before
            raise SpecError("device", device, f"cannot be used: {problem}") from None
