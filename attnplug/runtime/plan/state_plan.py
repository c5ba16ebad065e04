"""The pool of states of a model: pages of all layers by one number, their bytes, and the pages that requests need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attnplug.core.checks import check_size
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import LayoutError
from attnplug.core.spec import LayerSpec
from attnplug.core.state.caches import StateCacheSpec, state_cache_for


@dataclasses.dataclass(frozen=True, slots=True)
class StatePlan:
    """The states of a model on one rank.

    Args:
        caches: the state of each layer that keeps one, in layer order.
        num_states: pages of the pool, the null page included. One number is a page in each layer.
        drafts: most draft tokens of a request that a step verifies.
        block_size: tokens between two checkpoints; None without any.
    """

    caches: Mapping[str, StateCacheSpec]
    num_states: int
    drafts: int = 0
    block_size: int | None = None

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one page of all layers: the state of one request."""
        return sum(cache.page_size_bytes for cache in self.caches.values())

    @property
    def bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_states * self.bytes_per_state

    @property
    def max_requests(self) -> int:
        """Requests whose pages fit, each with one page for each draft; checkpoints take pages from them."""
        return (self.num_states - 1) // (1 + self.drafts)


def states_for(requests: int, drafts: int = 0) -> int:
    """The pages of so many requests: one each, one for each draft, and the null page."""
    return requests * (1 + drafts) + 1


def state_plan(specs: Mapping[str, LayerSpec], num_states: int | None = None) -> StatePlan | None:
    """The pool of the layers that keep a state; None without such layers.

    Args:
        specs: all layers.
        num_states: pages, the null page included; by default those of `BuilderConfig().max_num_seqs` requests.

    Raises:
        LayoutError: layers differ in drafts or checkpoints, though the states of a request advance together;
            `num_states` for a model without such layers.
        SpecError: fewer than 2 pages.
    """
    kept = {name: spec for name, spec in specs.items() if spec.state is not None}
    if not kept:
        if num_states is not None:
            raise LayoutError("num_states", num_states, "must be None: no layer keeps a state")
        return None
    drafts = _one_for_all("state.drafts", {n: spec.state.drafts for n, spec in kept.items() if spec.state})
    block_size = _one_for_all("block_size", {name: spec.block_size for name, spec in kept.items()})
    if num_states is None:
        num_states = states_for(BuilderConfig().max_num_seqs, drafts or 0)
    caches = {name: cache for name, spec in kept.items() if (cache := state_cache_for(spec)) is not None}
    return StatePlan(caches, check_size("num_states", num_states, 2), drafts or 0, block_size)


def _one_for_all(field: str, values: Mapping[str, int | None]) -> int | None:
    first: dict[int | None, str] = {}
    for name, value in values.items():
        first.setdefault(value, name)
    if len(first) > 1:
        found = ", ".join(f"{value} of {name}" for value, name in first.items())
        limit = f"must be one for all layers with a state, which advance together: {found}"
        raise LayoutError(field, list(first), limit, "use serving_states of attnplug.runtime")
    return next(iter(first))


def serving_states(
    specs: Mapping[str, LayerSpec], *, drafts: int = 0, block_size: int | None = None
) -> dict[str, LayerSpec]:
    """The layers as an engine serves them: those that keep a state verify drafts and keep checkpoints.

    Args:
        specs: layers by name, such as those of a ModelSpec.
        drafts: most draft tokens of a request that a step verifies.
        block_size: tokens between two checkpoints; None keeps none.
    """
    changed = dict(specs)
    for name, spec in specs.items():
        if spec.state is not None:
            state = dataclasses.replace(spec.state, drafts=drafts)
            changed[name] = spec.replace(state=state, block_size=block_size)
    return changed
