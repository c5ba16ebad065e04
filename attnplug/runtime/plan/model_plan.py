"""The plan for all layers of a model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from attnplug._system.json_files import parse_json, reading, texts, typed
from attnplug.core.checks import check_size
from attnplug.core.config import CONTEXT_CHUNK_ROWS
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.device import Device
from attnplug.core.hyperparameters import PerLayerParameters, group_by_hyperparameters
from attnplug.core.interface.answers import serving_class
from attnplug.core.kv_cache_spec import KVCacheConfig
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.selection.decision import VERSION, Decision, as_text, check_schema
from attnplug.runtime.plan.budget import MemoryBudget, bytes_per_block, fit_kv_cache, most_workspace_bytes
from attnplug.runtime.plan.grouping import group_kv_caches, planned_caches
from attnplug.runtime.plan.sharding import SharingCost, is_sharded, tokens_per_block
from attnplug.runtime.plan.state_plan import StatePlan, state_plan

if TYPE_CHECKING:
    from rich.console import Group

    from attnplug._system.terminal_tables import WrappedTable
    from attnplug.registry.registry import Registry

SCHEMA = "attnplug.plan"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelPlan:
    """The backend of each layer, the layers that share pages, and the memory that they need.

    Args:
        decisions: by layer, layers with direct K and V included.
        device: the device planned for.
        kv_sharing: layers that read another layer's pages, to that layer.
        num_blocks: blocks of the pool, the null block included; None without a number or memory, so that
            no cache can be allocated.
        memory: bytes given for the caches and the prefill workspace, or None.
        by_phase: by layer, the choice of each phase alone; empty unless the plan asked for it.
        notes: the choices that the plan gave up and why, and the notes of its decisions.
        context_chunk_rows: computed tokens that a prefill of latent attention expands at once.
        tuned: the digests of the tables of measured times that were read, with + between them; None without any.
            Ranks of one model need equal ones, because other times may choose other backends.
        context_parallel: the rank of this process among those that share the tokens of `sharded_layers`; None alone.
        new_tokens: by sharded layer, the decision for the tokens of a step, whose K and V come with the call.
        num_states: pages of the pool of states, the null page included; None without layers that keep a state.
    """

    decisions: Mapping[str, Decision]
    device: Device
    kv_sharing: Mapping[str, str]
    num_blocks: int | None = None
    memory: int | None = None
    by_phase: Mapping[str, Mapping[Phase, Decision]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    context_chunk_rows: int = CONTEXT_CHUNK_ROWS
    tuned: str | None = None
    context_parallel: ContextParallel | None = None
    new_tokens: Mapping[str, Decision] = dataclasses.field(default_factory=dict)
    num_states: int | None = None

    @property
    def specs(self) -> dict[str, LayerSpec]:
        """The spec of each layer."""
        return {name: decision.spec for name, decision in self.decisions.items()}

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The KV groups and raw tensors; over one block where the plan has no number of blocks."""
        num_blocks = 1 if self.num_blocks is None else self.num_blocks
        return group_kv_caches(planned_caches(self.decisions), num_blocks, self.kv_sharing)

    @property
    def states(self) -> StatePlan | None:
        """The pool of states, which all layers share by page numbers; None without layers that keep a state."""
        return state_plan(self.specs, self.num_states)

    @property
    def sharded_layers(self) -> tuple[str, ...]:
        """The layers whose tokens the ranks of `context_parallel` share, in layer order."""
        if self.context_parallel is None:
            return ()
        return tuple(name for name, spec in self.specs.items() if is_sharded(spec))

    @property
    def tokens_per_block(self) -> tuple[int, ...]:
        """Tokens of a request that one block number of each KV group covers, over all ranks."""
        groups = self.kv_cache_config.kv_cache_groups
        return tuple(tokens_per_block(group.kv_cache_spec, self.context_parallel) for group in groups)

    @property
    def hyperparameter_groups(self) -> dict[PerLayerParameters, list[str]]:
        """Layers that a planned backend can plan together: equal window, cap, scale and sinks."""
        return group_by_hyperparameters(
            {
                name: PerLayerParameters(spec.window[0], spec.logits_soft_cap, spec.scale, spec.has_sinks)
                for name, spec in self.specs.items()
            }
        )

    @property
    def budget(self) -> MemoryBudget | None:
        """The requests that fit into the memory or the blocks given; None without either."""
        config, memory, workspace = self.kv_cache_config, self.memory, self.prefill_workspace_bytes()
        states = self.states
        if memory is None:
            if self.num_blocks is None:
                return None
            # A number of blocks says nothing of requests, so the states are beside them.
            memory, states = bytes_per_block(config) * self.num_blocks + workspace, None
        found = fit_kv_cache(
            config,
            memory,
            prefill_workspace=workspace,
            context_parallel=self.context_parallel,
            states=states,
        )
        return dataclasses.replace(found, states=self.states)

    @property
    def sharing_cost(self) -> SharingCost | None:
        """From where sharing tokens makes decodes faster; None without it, or for a device that was not measured."""
        if self.context_parallel is None:
            return None
        shared = (self.specs[name] for name in self.sharded_layers)
        return SharingCost.of(self.context_parallel.size, shared, self.device)

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends chosen, in layer order."""
        return tuple(dict.fromkeys(str(decision.backend) for decision in self.decisions.values()))

    def prefill_workspace_bytes(self, rows: int | None = None) -> int:
        """Bytes for the computed tokens that prefills of latent attention expand; 0 without such layers.

        A runtime allocates them once, for all layers.

        Args:
            rows: tokens expanded at once; `context_chunk_rows` if None.
        """
        rows = self.context_chunk_rows if rows is None else rows
        return most_workspace_bytes((decision.spec for decision in self.decisions.values()), rows)

    @property
    def members(self) -> dict[str, dict[Phase, str]]:
        """The backend of each layer in each phase: a composite's halves, or one backend in both."""
        return {name: decision.members for name, decision in self.decisions.items()}

    def table(self) -> WrappedTable:
        """A table for rich: a row for each group of layers with equal specs and decisions.

        It has a column for each phase if a composite serves a layer, and for latent attention.
        """
        from attnplug._system.terminal_tables import WrappedTable

        latents = bool(self.by_phase) and any(decision.spec.mla for decision in self.decisions.values())
        split = latents or any("+" in name for name in self.backends)
        who = ["prefill", "decode"] if split else ["backend"]
        alike: dict[Any, list[str]] = {}
        for name, d in self.decisions.items():
            served = tuple(map(str, d.members.values() if split else [d.backend]))
            alike.setdefault((d.spec, served, d.block_size, d.kv_cache_layout), []).append(name)
        home = {n: str(i) for i, g in enumerate(self.kv_cache_config.kv_cache_groups) for n in g.layer_names}
        columns = ("layers", "first", "kind", *who, "block", "layout", "KV groups")
        table = WrappedTable(columns, right=("layers", "block"), heading="{layers} x {first}")
        for (spec, served, block_size, layout), names in alike.items():
            groups = ", ".join(dict.fromkeys(home[name] for name in names if name in home))
            row = (len(names), names[0], " ".join(spec.kinds), *served, block_size, layout, groups)
            table.add_row(*("-" if cell in (None, "") else str(cell) for cell in row))
        return table

    def __rich__(self) -> Group:
        from rich.console import Group

        from attnplug._system.terminal_tables import Paragraph

        parts = [f"{len(self.decisions)} layers on {self.device}"]
        if self.kv_sharing:
            parts.append(f"{len(self.kv_sharing)} read another's pages")
        if self.tuned is not None and any(each.measured for each in self.decisions.values()):
            parts.append(f"chosen by measured times {self.tuned}")
        budget = self.budget
        if budget is not None and budget.groups:
            tokens = "any number of" if budget.max_tokens is None else f"{budget.max_tokens:,}"
            parts.append(f"{budget.num_blocks:,} blocks of {budget.bytes_per_block:,} bytes")
            parts.append(f"one sequence of {tokens} tokens fits")
        if self.context_parallel is not None:
            parts.append(self._sharing(self.context_parallel))
        if (states := self.states) is not None:
            parts.append(f"{states.num_states:,} states of {states.bytes_per_state:,} bytes")
        if workspace := self.prefill_workspace_bytes():
            parts.append(f"a prefill workspace of {workspace:,} bytes")
        cost = self.sharing_cost
        notes = (*self.notes, *([] if cost is None else [str(cost)]))
        return Group(Paragraph(", ".join(parts)), self.table(), *map(Paragraph, notes))

    def _sharing(self, place: ContextParallel) -> str:
        """The layers whose tokens the ranks share, and the gain in tokens."""
        config, budget = self.kv_cache_config, self.budget
        count = len(self.sharded_layers)
        which = "all layers" if count == len(self.decisions) else f"{count} of {len(self.decisions)} layers"
        text = f"{place.size} ranks share the tokens of {which}"
        if budget is not None and budget.max_tokens:
            alone = fit_kv_cache(config, budget.memory, prefill_workspace=budget.prefill_workspace).max_tokens
            text += f", {budget.max_tokens / (alone or 1):.2f} x the {alone:,} tokens of one rank"
        return text

    def __str__(self) -> str:
        return as_text(self)

    def layer_digests(self) -> dict[str, str]:
        """A digest of the decisions for each layer: backends with versions, options, spec, pages and phases."""
        digests = {}
        for name, decision in self.decisions.items():
            parts = (decision, *self.by_phase.get(name, {}).values(), self.new_tokens.get(name))
            digests[name] = _digest([_chosen_facts(part) for part in parts if part is not None])
        return digests

    def digest(self) -> str:
        """A digest of all decisions that must be equal on the ranks of a group; it leaves out the rank."""
        place = self.context_parallel
        shared = None if place is None else [place.size, place.interleave]
        pool = self.num_blocks, self.context_chunk_rows, self.num_states
        facts = [self.device.to_dict(), dict(self.kv_sharing), *pool, self.tuned, shared]
        return _digest([list(self.layer_digests().items()), facts])

    def to_dict(self) -> dict[str, Any]:
        """A JSON object. It leaves out groups and budget, which `from_dict` computes again.

        `sharing_cost` is there for readers, and `from_dict` computes it again.
        """
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "device": self.device.to_dict(),
            "decisions": {name: decision.to_dict() for name, decision in self.decisions.items()},
            "members": {
                name: {str(phase): backend for phase, backend in phases.items()}
                for name, phases in self.members.items()
            },
            "by_phase": {
                name: {str(phase): decision.to_dict() for phase, decision in phases.items()}
                for name, phases in self.by_phase.items()
            },
            "kv_sharing": dict(self.kv_sharing),
            "num_blocks": self.num_blocks,
            "memory": self.memory,
            "context_chunk_rows": self.context_chunk_rows,
            "tuned": self.tuned,
            "context_parallel": self.context_parallel and self.context_parallel.to_dict(),
            "new_tokens": {name: decision.to_dict() for name, decision in self.new_tokens.items()},
            "num_states": self.num_states,
            "sharing_cost": self.sharing_cost and self.sharing_cost.to_dict(),
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], registry: Registry | None = None) -> Self:
        """The plan that `to_dict` wrote.

        Args:
            data: the JSON object.
            registry: finds the backends by name. Without one the plan can be read and printed, but not
                run; the process's registry is `attnplug.registry.get_registry()`.

        Raises:
            SpecError: another schema, or damaged data.
        """

        def decision(item: Mapping[str, Any]) -> Decision:
            read = Decision.from_dict(item)
            # By the backend's own name, not a family's: () where it is not loaded.
            offers = () if registry is None else registry.plugins.find(read.full_name or "")
            found = (
                serving_class(offer.backend, read.spec) for offer in offers if offer.name == read.backend
            )
            return dataclasses.replace(read, backend_cls=next(found, None))

        with reading("plan"):
            check_schema(data, SCHEMA)
            by_phase, kv_sharing = typed(data, "by_phase", dict), typed(data, "kv_sharing", dict)
            # Older files have none of these.
            data = {"context_parallel": None, "new_tokens": {}, "num_states": None, **data}
            place, new_tokens = typed(data, "context_parallel", dict, None), typed(data, "new_tokens", dict)
            if not all(type(value) is str for value in kv_sharing.values()):
                raise TypeError("kv_sharing must map layer names to layer names")
            made = cls(
                decisions={name: decision(item) for name, item in typed(data, "decisions", dict).items()},
                device=Device.from_dict(typed(data, "device", dict)),
                kv_sharing=dict(kv_sharing),
                num_blocks=typed(data, "num_blocks", int, None),
                memory=typed(data, "memory", int, None),
                by_phase={
                    name: {Phase(phase): decision(item) for phase, item in phases.items()}
                    for name, phases in by_phase.items()
                },
                notes=texts(data, "notes"),
                context_chunk_rows=check_size(
                    "context_chunk_rows", data.get("context_chunk_rows", CONTEXT_CHUNK_ROWS)
                ),
                # Older files do not have it.
                tuned=typed({"tuned": None, **data}, "tuned", str, None),
                context_parallel=None if place is None else ContextParallel.from_dict(place),
                new_tokens={name: decision(item) for name, item in new_tokens.items()},
                num_states=typed(data, "num_states", int, None),
            )
            # Computed here, so that this call refuses layers whose caches do not fit each other.
            _ = made.budget
            return made

    @classmethod
    def from_json(cls, text: str, registry: Registry | None = None) -> Self:
        """The plan that `to_json` wrote; see `from_dict`."""
        with reading("plan"):
            return cls.from_dict(parse_json(text), registry)


def _chosen_facts(decision: Decision) -> list[Any]:
    chosen, options = decision.chosen, decision.options
    version = None if chosen is None else [chosen.distribution, chosen.version]
    # Ranks agree on values; whether a rank wrote a default itself does not count.
    spec = {**decision.spec.to_dict(), "derived": None}
    plain = None if options is None else dict(options)
    # Ranks that divide their steps otherwise would have other bits, whatever the reasons.
    served = [decision.full_name] if decision.steps else []
    pages = decision.block_size, decision.kv_cache_layout
    return [decision.backend, version, plain, spec, *pages, *served]


def _digest(facts: object) -> str:
    # Sorted keys, because the order of options and fields is not a fact.
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
