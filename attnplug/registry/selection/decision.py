"""The choice of a backend, and the reasons against each other candidate."""

from __future__ import annotations

import dataclasses
import enum
import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from attnplug._system.json_files import parse_json, reading, texts, typed
from attnplug._system.text import shown
from attnplug.core.composite.pair import class_of, reference_of
from attnplug.core.composite.steps import StepChoice, join_routes
from attnplug.core.device import Device
from attnplug.core.errors import NoBackendError, PluginError
from attnplug.core.interface.answers import declared
from attnplug.core.interface.guarded import describe, guarded_call
from attnplug.core.prefix_sharing import sharing_refusal
from attnplug.core.reasons import Reason
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.measured.comparisons import Measured
from attnplug.registry.measured.sharing_prices import TablePrices, built_in_prices
from attnplug.registry.plugins.option_values import as_tuples, make_options

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from attnplug._system.terminal_tables import WrappedTable
    from attnplug.core.backend import AttentionBackend

SCHEMA = "attnplug.decision"
VERSION = 1
_AS_IS: dict[str, tuple[type | None, ...]] = {
    "layer_name": (str, None),
    "backend": (str, None),
    "level": (str,),
    "chosen_by": (str, None),
    "rule": (str, None),
    "block_size": (int, None),
    "kv_cache_layout": (str, None),
    "assumed": (str, list, None),
}
"""Fields of a Decision that JSON can have as they are, and their types there."""
_TUPLES = ("ranked_by", "allow_refuted", "notes")


class Gate(enum.StrEnum):
    """The gates, in order."""

    PLUGIN = "plugin"
    """The plugin loaded."""
    INSTALLED = "installed"
    """The distributions that it requires are installed."""
    CONFIGURATION = "configuration"
    """It serves the spec on the device."""
    EVIDENCE = "evidence"
    """No run on this machine refuted it."""
    IMPORT = "import"
    """Its parts import on this machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """One layer on one device in one phase, for which a backend is chosen; a phase of None means both."""

    spec: LayerSpec
    device: Device
    phase: Phase | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One backend and the verdict on it.

    Args:
        name: the backend's name, or the plugin's if it did not load.
        distribution: its distribution; None for a plugin registered in code.
        version: the distribution's version.
        priority: its place in the automatic order, higher first; None if it is not known.
        refused_at: the first gate that it failed, or None.
        reasons: every reason against it; empty if it was accepted.
        measured_us: measured microseconds of a layer's attention at the shape that the decision's `measured` names;
            None if no table decided, or it was not measured.
    """

    name: str
    distribution: str | None = None
    version: str | None = None
    priority: int | None = None
    refused_at: Gate | None = None
    reasons: tuple[Reason, ...] = ()
    measured_us: float | None = None

    @property
    def accepted(self) -> bool:
        """Whether it passed every gate that was tried."""
        return self.refused_at is None

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the reasons against it."""
        return tuple(reason.code for reason in self.reasons)

    def note_time(self, us: float) -> None:
        """Set its measured microseconds; only for the selection that has just made this candidate."""
        # A new object for each candidate takes ten times as long.
        object.__setattr__(self, "measured_us", us)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return {
            **{name: getattr(self, name) for name in ("name", "distribution", "version", "priority")},
            "accepted": self.accepted,
            "refused_at": self.refused_at and str(self.refused_at),
            "reasons": [reason.to_dict() for reason in self.reasons],
            "measured_us": self.measured_us,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The candidate that `to_dict` wrote. SpecError for damaged data."""
        with reading("candidate"):
            refused_at = typed(data, "refused_at", str, None)
            # Older files do not have it.
            us = typed({"measured_us": None, **data}, "measured_us", int, float, None)
            return cls(
                name=typed(data, "name", str),
                distribution=typed(data, "distribution", str, None),
                version=typed(data, "version", str, None),
                priority=typed(data, "priority", int, None),
                refused_at=None if refused_at is None else Gate(refused_at),
                reasons=tuple(map(Reason.from_dict, typed(data, "reasons", list))),
                measured_us=us,
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a selection: every candidate with its gate, priority and reasons.

    Args:
        spec: the layer.
        device: the device.
        phase: the phase; None for both.
        backend: the chosen backend's name, or None if none serves the layer.
        candidates: all of them: accepted ones first, in ranking order, then refused ones, nearest first.
        layer_name: the layer's name, if one was given.
        level: "usable" if the chosen backend's parts were imported here, else "declared".
        chosen_by: "priority", "measured", "rank", or the source of the rule.
        rule: the rule that asked for the backend, or None.
        ranked_by: the plugins whose `attnplug_rank` reordered the candidates.
        measured: the comparison of measured times that decided; None if none did.
        block_size: tokens per KV page; None without a backend or pages.
        kv_cache_layout: "NHD" or "HND"; None without a backend or pages.
        options: the chosen backend's options by name, if it has any, as JSON has them: an enumeration's value.
        assumed: versions assumed instead of the installed ones: "all", pairs, or None.
        allow_refuted: the names of backends that may serve although runs here refuted them, or "all".
        notes: errors that did not change the choice, and evidence that the user overrode.
        steps: for a composite, the ranges of steps that one member serves whole, and why; the first that has a step
            counts. All other steps are served by the members of their phases.
        sharing_prices: those of shared prefixes that a tuned table has; None for the built-in ones.
    """

    spec: LayerSpec
    device: Device
    phase: Phase | None
    backend: str | None
    candidates: tuple[Candidate, ...]
    layer_name: str | None = None
    level: str = "declared"
    chosen_by: str | None = None
    rule: str | None = None
    ranked_by: tuple[str, ...] = ()
    measured: Measured | None = None
    block_size: int | None = None
    kv_cache_layout: str | None = None
    options: tuple[tuple[str, Any], ...] | None = None
    assumed: Any = None
    allow_refuted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps: tuple[StepChoice, ...] = ()
    sharing_prices: TablePrices | None = None
    # Not compared, because a decision read from JSON has no class and equals the one written.
    backend_cls: type[AttentionBackend] | None = dataclasses.field(default=None, repr=False, compare=False)
    """The chosen class; None without one, or if the decision was read from JSON."""

    def __reduce__(self) -> tuple[object, tuple[Any, ...]]:
        """Pickled with its class where another process finds that or its halves, and else without it, as in JSON."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        values["backend_cls"] = None if self.backend_cls is None else reference_of(self.backend_cls)
        return _unpickled, (values,)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        # It never changes, and keeps a class that pickle would not find.
        return self

    def __bool__(self) -> bool:
        return self.backend is not None

    def get_backend_cls(self) -> type[AttentionBackend]:
        """The chosen backend's class.

        Raises:
            NoBackendError: none was chosen.
            PluginError: the decision was read from JSON; ask `attnplug.list_backends()` for the class.
        """
        if self.backend is None:
            raise NoBackendError(f"no backend was chosen: {self.explanation()}", self)
        if self.backend_cls is None:
            raise PluginError(
                f"a decision read from JSON knows the name {self.backend} only; "
                "attnplug.list_backends() has the classes loaded here, and ModelPlan.from_json takes a registry"
            )
        return self.backend_cls

    def get_options(self) -> Any:
        """The chosen backend's `Options` with the values of the user; None if it has none.

        Raises:
            NoBackendError, PluginError: as `get_backend_cls`; PluginError too for a class with other options.
        """
        options = declared(self.get_backend_cls(), "Options")
        if options is None:
            return None
        made, error = guarded_call(make_options, options, dict(self.options or ()))
        if error is not None:
            raise PluginError(f"the Options of {self.backend} cannot be made: {describe(error)}") from error
        return made

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that was chosen."""
        return next((c for c in self.candidates if c.accepted and c.name == self.backend), None)

    @property
    def prefix_refusal(self) -> str | None:
        """Why requests cannot read shared prefixes of the layer together; None if they can.

        Raises:
            NoBackendError, PluginError: as `get_backend_cls`.
        """
        return sharing_refusal(self.get_backend_cls(), self.spec, self.device, self.block_size)

    @property
    def shares_prefixes(self) -> bool:
        """Whether requests may read shared prefixes of the layer together, in steps where that pays."""
        return self.prefix_refusal is None

    @property
    def price_source(self) -> str:
        """The origin of the prices by which steps decide whether requests read shared prefixes together."""
        if self.sharing_prices is not None:
            return self.sharing_prices.source
        return (
            "built in"
            if self.is_priced
            else f"none; attnplug tune measures those of {self.backend or 'a backend'}"
        )

    @property
    def is_priced(self) -> bool:
        """Whether there are prices, without which steps share no prefixes by default."""
        device = self.device
        found = self.sharing_prices or built_in_prices(device.type, device.name, self.backend or "")
        return found is not None

    @property
    def members(self) -> dict[Phase, str]:
        """The backend of each phase: a composite's halves, or one backend in both; "none" without one."""
        prefill, *others = (self.backend or "none").split("+")
        return {Phase.PREFILL: prefill, Phase.DECODE: others[0] if others else prefill}

    @property
    def full_name(self) -> str | None:
        """The name by which a registry finds the backend, with the routes of a composite: "A+B[draft on A]"."""
        if not self.steps:
            return self.backend
        halves = f"{self.members[Phase.PREFILL]}+{self.members[Phase.DECODE]}"
        return join_routes(halves, tuple((each.steps, each.backend) for each in self.steps))

    @property
    def refused(self) -> tuple[Candidate, ...]:
        """The candidates that do not serve the layer."""
        return tuple(candidate for candidate in self.candidates if not candidate.accepted)

    @property
    def pages(self) -> tuple[int, str] | None:
        """Tokens per KV page and the layout; None without a backend or pages."""
        size, layout = self.block_size, self.kv_cache_layout
        return None if size is None or layout is None else (size, layout)

    def explanation(self) -> str:
        """Every refused candidate with its reasons, in one line each."""
        lines = [f"{c.name}: {'; '.join(c.reasons)}" for c in self.refused]
        return "\n".join(lines) if lines else "no backend is installed"

    def table(self) -> WrappedTable:
        """A table for rich: candidate, priority, verdict and reasons."""
        # rich is imported only when a decision is printed.
        from attnplug._system.terminal_tables import WrappedTable, verdict

        columns = ("backend", "priority", "verdict", "why")
        table = WrappedTable(columns, ("priority",), ("backend", "verdict"), heading="{backend}  {verdict}")
        for candidate in self.candidates:
            won = candidate is self.chosen
            word = "chosen" if won else "accepted" if candidate.accepted else "refused"
            asked = self.rule and f"asked for by {self.chosen_by} ({self.rule})"
            by = ", ".join(self.ranked_by) or self.chosen_by
            chosen_by = asked or (f"first by {by}" if self.measured is None else str(self.measured))
            timed = [] if candidate.measured_us is None else [f"{candidate.measured_us:.1f} us"]
            why = f"{self.level}; {chosen_by}" if won else "\n".join((*timed, *candidate.reasons))
            priority = "" if candidate.priority is None else str(candidate.priority)
            table.add_row(candidate.name, priority, verdict(word), why)
        return table

    def __rich__(self) -> Group:
        from rich.console import Group

        from attnplug._system.terminal_tables import Paragraph

        phase = f" in {self.phase}" if self.phase else ""
        layer = f"{self.layer_name}: " if self.layer_name else ""
        title = f"{layer}{self.backend or 'no backend'} on {self.device}{phase}"
        prices = [] if self.sharing_prices is None else [f"shared prefixes: {self.sharing_prices}"]
        about = map(Paragraph, (*map(str, self.steps), *prices, *self.notes))
        return Group(Paragraph(title), self.table(), *about)

    def __str__(self) -> str:
        return as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with every field but the class, and its schema and version."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            **{name: getattr(self, name) for name in _AS_IS},
            **{name: list(getattr(self, name)) for name in _TUPLES},
            "measured": None if self.measured is None else dataclasses.asdict(self.measured),
            "options": None if self.options is None else dict(self.options),
            "spec": self.spec.to_dict(),
            "device": self.device.to_dict(),
            "phase": self.phase and str(self.phase),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "steps": [each.to_dict() for each in self.steps],
            **({} if self.sharing_prices is None else {"sharing_prices": self.sharing_prices.to_dict()}),
        }

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The decision that `to_dict` wrote; it equals the one written.

        Raises:
            SpecError: another schema, or damaged data.
        """
        with reading("decision"):
            check_schema(data, SCHEMA)
            # Older files do not have them.
            data = {"allow_refuted": [], "measured": None, "steps": [], "sharing_prices": None, **data}
            fields: dict[str, Any] = {name: typed(data, name, *kinds) for name, kinds in _AS_IS.items()}
            fields |= {name: texts(data, name) for name in _TUPLES}
            # JSON has lists for pairs, and a list does not equal the tuple that was written.
            if isinstance(fields["assumed"], list):
                fields["assumed"] = tuple((str(name), str(version)) for name, version in fields["assumed"])
            options, phase = typed(data, "options", dict, None), typed(data, "phase", str, None)
            measured = typed(data, "measured", dict, None)
            prices = typed(data, "sharing_prices", dict, None)
            if options is not None:
                fields["options"] = tuple(sorted((k, as_tuples(v)) for k, v in options.items()))
                # Such as an object within a list: no option is one, and a decision is hashable.
                hash(fields["options"])
            return cls(
                spec=LayerSpec.from_dict(typed(data, "spec", dict)),
                device=Device.from_dict(typed(data, "device", dict)),
                phase=None if phase is None else Phase(phase),
                candidates=tuple(map(Candidate.from_dict, typed(data, "candidates", list))),
                measured=None if measured is None else Measured.from_dict(measured),
                steps=tuple(map(StepChoice.from_dict, typed(data, "steps", list))),
                sharing_prices=None if prices is None else TablePrices.from_dict(prices),
                **fields,
            )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The decision that `to_json` wrote. SpecError as `from_dict`."""
        with reading("decision"):
            return cls.from_dict(parse_json(text))


def _unpickled(values: dict[str, Any]) -> Decision:
    return Decision(**{**values, "backend_cls": class_of(values["backend_cls"])})


def check_schema(data: Mapping[str, Any], schema: str) -> None:
    """ValueError for data of another schema, or version of it, than this attnplug writes."""
    found = data.get("schema"), data.get("version")
    # Before its release, attnplug wrote the number alone.
    if found not in ((schema, VERSION), (VERSION, None)):
        text = f"schema={shown(found[0])}, version={shown(found[1])}"
        raise ValueError(f"{text}: this attnplug reads {schema}, version {VERSION}")


def as_text(renderable: RenderableType, width: int = 100) -> str:
    """The text that rich prints, without colour, markup or trailing spaces."""
    from attnplug._system.terminal_tables import SafeConsole

    text = io.StringIO()
    console = SafeConsole(file=text, width=width, color_system=None, markup=False, highlight=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
