"""The checks of shared prefixes and draft trees pass what is right, and see each planted mistake."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.core.features import Feature
from attnplug.registry.devices import resolve_device
from attnplug.runtime.batch import draft_trees
from attnplug.runtime.batch.draft_trees import TreeShape
from attnplug.runtime.batch.forest import Forest, reach_of
from attnplug.runtime.steps import prefix_sharing, twin_layers
from attnplug.testing.conformance.check import CheckSkipped, ConformanceError, Level
from attnplug.testing.conformance.serving import forests
from attnplug.testing.conformance.target import Target

TARGET = Target(TorchBackend, resolve_device("cpu"), Level.SMOKE)
CHECKS = {check.id: check for check in forests.checks(TARGET)}


@pytest.mark.parametrize("name", CHECKS)
def test_torch_passes(name: str) -> None:
    CHECKS[name].run()


def sinks_twice(patch: pytest.MonkeyPatch) -> None:
    right = twin_layers.piece_spec
    patch.setattr(
        twin_layers,
        "piece_spec",
        lambda backend, spec, *at: right(backend, spec, *at).replace(has_sinks=spec.has_sinks),
    )


def sinks_never(patch: pytest.MonkeyPatch) -> None:
    right = twin_layers.rest_spec
    patch.setattr(twin_layers, "rest_spec", lambda spec: right(spec).replace(has_sinks=False))


def cap_left_out(patch: pytest.MonkeyPatch) -> None:
    right = twin_layers.piece_spec
    patch.setattr(twin_layers, "piece_spec", lambda *given: right(*given).replace(logits_soft_cap=None))


def a_level_lost(patch: pytest.MonkeyPatch) -> None:
    right = prefix_sharing.piece_rows
    patch.setattr(
        prefix_sharing,
        "piece_rows",
        lambda host, table, size, nodes, *rest: right(host, table, size, nodes[1:], *rest),
    )


def a_stranger_reads_a_node(patch: pytest.MonkeyPatch) -> None:
    right = prefix_sharing.find_forest

    def wrong(table: Any, *given: Any) -> Forest | None:
        forest = right(table, *given)
        if forest is None:
            return None
        node = forest.nodes[0]
        # The last request shares nothing.
        readers = np.union1d(node.readers, [table.shape[0] - 1])
        return forest._replace(nodes=[node._replace(readers=readers), *forest.nodes[1:]])

    patch.setattr(prefix_sharing, "find_forest", wrong)


def blocks_kept_twice(patch: pytest.MonkeyPatch) -> None:
    right = prefix_sharing.rest_rows
    patch.setattr(
        prefix_sharing,
        "rest_rows",
        lambda host, size, kept, trees: right(host, size, kept * 0, trees),
    )


def the_window_of_another_row(patch: pytest.MonkeyPatch) -> None:
    def wrong(computed: Any, scheduled: Any, size: int, left: int, *rest: Any) -> Any:
        # As if the first key that a row sees began a block.
        return reach_of(computed // size * size, scheduled * 0 + 1, size, left, *rest)

    patch.setattr(prefix_sharing, "reach_of", wrong)


def _with_paths(patch: pytest.MonkeyPatch, wrong: Callable[[TreeShape], list[list[int]]]) -> None:
    right = draft_trees.shape_of

    def planted(parents: tuple[int, ...]) -> TreeShape:
        shape = right(parents)
        paths = wrong(shape)
        members, counts = np.array([*itertools.chain(*paths)]), np.array([*map(len, paths)])
        return shape._replace(members=members, counts=counts)

    patch.setattr(draft_trees, "shape_of", planted)


def _paths(shape: TreeShape) -> list[list[int]]:
    ends = np.cumsum(shape.counts)
    return [shape.members[end - count : end].tolist() for end, count in zip(ends, shape.counts, strict=True)]


def a_sibling_is_seen(patch: pytest.MonkeyPatch) -> None:
    _with_paths(patch, lambda shape: [list(range(node + 1)) for node in range(shape.parents.size)])


def the_own_token_is_left_out(patch: pytest.MonkeyPatch) -> None:
    _with_paths(patch, lambda shape: [path[:-1] or path for path in _paths(shape)])


def the_context_is_lost(patch: pytest.MonkeyPatch) -> None:
    right = prefix_sharing.piece_rows
    patch.setattr(prefix_sharing, "piece_rows", lambda *given: right(*given[:-1], {}))


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("forest/cap-sinks", sinks_twice),
        ("forest/cap-sinks", sinks_never),
        ("forest/cap-sinks", cap_left_out),
        ("forest/full", a_level_lost),
        ("forest/full", a_stranger_reads_a_node),
        ("forest/full", blocks_kept_twice),
        ("forest/window", the_window_of_another_row),
        ("tree/full", a_sibling_is_seen),
        ("tree/full", the_own_token_is_left_out),
        ("tree/full", the_context_is_lost),
    ],
)
def test_a_planted_mistake_is_seen(
    name: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(ConformanceError):
        CHECKS[name].run()


def listed(**fields: Any) -> Iterator[str]:
    made = type("Made", (TorchBackend,), fields)
    return (check.id for check in forests.checks(Target(made, resolve_device("cpu"), Level.SMOKE)))


def test_backends_without_lse_have_no_such_checks() -> None:
    assert not list(listed(features=TorchBackend.features & ~Feature.LSE))


def test_a_backend_that_refuses_pieces_is_skipped_with_the_reason() -> None:
    made = type(
        "Made", (TorchBackend,), {"features": TorchBackend.features & ~(Feature.CROSS | Feature.NON_CAUSAL)}
    )
    check = next(iter(forests.checks(Target(made, resolve_device("cpu"), Level.SMOKE))))
    with pytest.raises(CheckSkipped, match="pieces of a prefix are refused"):
        check.run()
