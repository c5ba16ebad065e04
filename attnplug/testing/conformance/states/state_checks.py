"""The schedules that a state layer is run in: prompts, chunks, decodes, drafts, checkpoints, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.features import Feature
from attnplug.core.metadata import AttentionCGSupport
from attnplug.core.spec import LayerSpec
from attnplug.runtime.states.state_step import StateStep, batch_of
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    ConformanceError,
    Level,
    SkipKind,
)
from attnplug.testing.conformance.harness import raw_bytes
from attnplug.testing.conformance.states.state_cases import draw_inputs, state_layers
from attnplug.testing.conformance.states.state_graphs import StateGraph, graph_level
from attnplug.testing.conformance.states.state_runs import StateServing
from attnplug.testing.conformance.target import Target

_FEW = ("prompts", "decodes", "mixed")
_MANY = 40
_LENGTHS = {"a": 1, "b": 2, "c": 37, "d": 70, "e": 16}


def checks(target: Target) -> Iterator[Check]:
    """One check for each schedule and layer, and one that fails for a declared rule without a layer."""
    layers, features = state_layers(target), target.backend.features
    for rule in target.backend.supported_state_rules:
        summary = f"a layer of the declared rule {rule} is served"
        yield Check.of(f"states/served-{rule}", summary, _check_served, target, rule, layers)
    tried = set[Any]()
    for words, spec in layers.items():
        # Other sizes and dtypes of a kind of layer are tried in a few schedules.
        few = target.level is Level.SMOKE and spec.state in tried
        tried.add(spec.state)
        for name, (run, summary, needed) in _SCHEDULES.items():
            is_wanted = not few or name in _FEW
            if needed in features and is_wanted and (name != "graphs" or graph_level(target.backend)):
                yield Check.of(f"states/{name}-{words}", summary, run, target, spec)


def run_state_layer(target: Target, spec: LayerSpec) -> None:
    """Prompts and decodes of one layer, and the drafts and checkpoints that it asks for.

    Raises:
        ConformanceError: an output is wrong.
    """
    _prompts(target, spec)
    asked = spec.required_features()
    for run, _, needed in _SCHEDULES.values():
        if needed and needed in asked:
            run(target, spec)


def _check_served(target: Target, rule: str, layers: Mapping[str, LayerSpec]) -> None:
    if not any(spec.state is not None and spec.state.rule == rule for spec in layers.values()):
        raise ConformanceError(f"supported_state_rules has {rule}, and the backend serves no layer of it")


def _prompts(target: Target, spec: LayerSpec, **more: Any) -> None:
    serving = StateServing(target, spec, **more)
    for seed, (name, length) in enumerate(_LENGTHS.items()):
        serving.add(name, length + 3, seed)
    # Short prompts of 1 and 2 tokens are shorter than a convolution.
    serving.step(_LENGTHS)
    serving.step(dict.fromkeys(_LENGTHS, 1))
    serving.step({"c": 2, "a": 1})


def _strong(target: Target, spec: LayerSpec) -> None:
    _prompts(target, spec, decays="strong")


def _resets(target: Target, spec: LayerSpec) -> None:
    _prompts(target, spec, decays="resets")


def _large(target: Target, spec: LayerSpec) -> None:
    serving = StateServing(target, spec)
    serving.add("long", 303, 0)
    serving.step({"long": 300})
    others = [f"r{number}" for number in range(_MANY)]
    for number, name in enumerate(others):
        serving.add(name, 5, number + 1)
    serving.step({name: 1 + number % 2 for number, name in enumerate(others)})
    serving.step(dict.fromkeys([*others, "long"], 1))


def _strided(target: Target, spec: LayerSpec) -> None:
    refused = []
    for name, view in (("of wider tensors", _slice), ("with the tokens inside", _tokens_inside)):
        try:
            _prompts(target, spec, view=view)
        except ConformanceError as problem:
            if not isinstance(problem.__cause__, (BatchError, LayoutError)):
                text = f"with inputs as views {name}: {problem}"
                raise ConformanceError(text, problem.named, says=problem.says) from problem.__cause__
            refused.append(f"views {name} are refused: {problem.__cause__}")
    if refused:
        raise CheckSkipped("; ".join(refused), SkipKind.ALLOWED)


def _slice(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a part of one projection, with NaN beside it."""
    beside = torch.full_like(tensor, torch.nan)
    return torch.cat([beside, tensor, beside], 1)[:, tensor.shape[1] : 2 * tensor.shape[1]]


def _tokens_inside(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with neighbouring tokens side by side, as convolutions of libraries have them."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def _chunks(target: Target, spec: LayerSpec) -> None:
    serving = StateServing(target, spec)
    serving.add("a", 110, 1)
    serving.add("b", 80, 2)
    for first, second in ((17, 0), (1, 33), (30, 1), (2, 2), (1, 1), (45, 1), (1, 20)):
        serving.step({"a": first, "b": second})


def _decodes(target: Target, spec: LayerSpec) -> None:
    serving = StateServing(target, spec)
    for seed, (name, length) in enumerate(_LENGTHS.items()):
        serving.add(name, length + 8, seed)
        serving.step({name: length})
    names = list(_LENGTHS)
    for order in (names, names[::-1], names[2:], [*names[3:], names[0]], names):
        # Each decode is told apart: a step in another order has the same pages.
        serving.step(dict.fromkeys(order, 1))


def _mixed(target: Target, spec: LayerSpec) -> None:
    serving = StateServing(target, spec)
    serving.add("old", 60, 1)
    serving.add("idle", 20, 2)
    serving.step({"old": 21, "idle": 9})
    serving.add("new", 64, 3)
    serving.step({"idle": 0, "old": 1, "new": 19})
    serving.remove("old")
    # The pages of the removed request are given to this one, which starts from zeros.
    serving.add("late", 40, 4)
    serving.step({"late": 5, "idle": 2, "new": 1})
    serving.step({"new": 40, "late": 1, "idle": 1})
    serving.step({"late": 3, "idle": 1, "new": 1})


def _repeats(target: Target, spec: LayerSpec) -> None:
    serving = StateServing(target, spec, in_place=False)
    serving.add("a", 40, 1)
    serving.add("b", 40, 2)
    for counts in ({"a": 9, "b": 20}, {"a": 1, "b": 1}, {"b": 7, "a": 1}):
        serving.step(counts, runs=2)


def _dummies(target: Target, spec: LayerSpec) -> None:
    serving = StateServing(target, spec)
    serving.add("a", 30, 1)
    serving.step({"a": 7})
    for scheduled in ([1, 1], [9, 0, 3]):
        names = [f"padding-{place}" for place in range(len(scheduled))]
        common = batch_of(names, scheduled, [0] * len(names))
        device = serving.pages.device
        common = common.changed(
            query_start_loc=common.query_start_loc.to(device), seq_lens=common.seq_lens.to(device)
        )
        found = serving.run(StateStep.padding(common), draw_inputs(spec, sum(scheduled), 9))
        if not bool(found.isfinite().all()):
            raise ConformanceError("a dummy step, which starts from zeros, gave NaN: it read a page")
        serving.step({"a": 2})


def _drafts(target: Target, spec: LayerSpec) -> None:
    most = 0 if spec.state is None else spec.state.drafts
    serving = StateServing(target, spec)
    for seed, name in enumerate("abc"):
        serving.add(name, 60, seed)
    serving.step({"a": 12, "b": 3, "c": 1})
    for good in (1, most + 1, 2, 1):
        counts, drafts = dict.fromkeys("abc", most + 1), dict.fromkeys("abc", most)
        # One of the requests verifies no drafts, and is a decode beside them.
        counts["b"] = drafts["b"] = 1
        drafts["b"] = 0
        serving.step(counts, drafts=drafts, accepted={"a": good, "c": max(good - 1, 1)})
    serving.step(dict.fromkeys("abc", 1))


def _checkpoints(target: Target, spec: LayerSpec) -> None:
    size = spec.block_size or 1
    serving = StateServing(target, spec)
    serving.add("a", 3 * size + 9, 1)
    serving.add("b", 2 * size + 4, 2)
    # Two borders in one chunk, then one at its last token.
    serving.step({"a": 2 * size + 3, "b": 5})
    serving.step({"b": size - 5, "a": 1})
    serving.add("c", 2 * size + 7, 3, prefix="a", shared=size)
    serving.add("d", 2 * size + 7, 4, prefix="a", shared=2 * size)
    serving.add("e", size + 7, 5, prefix="b", shared=size)
    serving.step({"a": 1, "c": 6, "d": 1, "e": 1, "b": 1})
    serving.step({"c": 1, "d": 1, "e": 4, "a": size})
    serving.add("f", 3 * size + 8, 6, prefix="a", shared=3 * size)
    serving.step({"f": 2, "a": 1, "c": 1})


def _graphs(target: Target, spec: LayerSpec) -> None:
    serving = StateServing(target, spec)
    for seed, (name, length) in enumerate(_LENGTHS.items()):
        serving.add(name, length + 16, seed)
        serving.step({name: length})
    drafts = 0 if spec.state is None else spec.state.drafts
    levels = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.UNIFORM_BATCH
    for queries in [
        queries for queries, level in zip((1, 3), levels, strict=True) if graph_level(target.backend) >= level
    ]:
        before = raw_bytes(serving.pages)
        serving.graph = StateGraph(serving, queries)
        if not torch.equal(raw_bytes(serving.pages), before):
            raise ConformanceError("a capture, whose pages and slots are -1, changed a page")
        # Fewer requests than the graph has are padded, and each replay has other pages.
        for names in ("abcd", "ca", "dbe", "b"):
            counts = dict.fromkeys(names, queries)
            kept = {names[0]: 1} if queries > 1 and drafts >= queries - 1 else {}
            serving.step(counts, drafts=dict.fromkeys(kept, queries - 1), accepted=kept)


def _random(target: Target, spec: LayerSpec) -> None:
    for seed in range(1 if target.level is Level.SMOKE else 8):
        _random_schedule(target, spec, random.Random(seed))  # noqa: S311


def _random_schedule(target: Target, spec: LayerSpec, rng: random.Random) -> None:
    serving = StateServing(target, spec, in_place=rng.random() < 0.5)
    drafts = 0 if spec.state is None else spec.state.drafts
    for number in range(10):
        if len(serving.requests) < 4:
            serving.add(f"r{number}", 50, number)
        counts = {
            name: min(rng.choice([0, 1, 1, 2, 5, 19]), 50 - each.done)
            for name, each in serving.requests.items()
        }
        order = rng.sample(list(counts), len(counts))
        chosen = {n: rng.randint(1, min(drafts, counts[n] - 1)) for n in order if drafts and counts[n] > 1}
        accepted = {n: rng.randint(counts[n] - chosen[n], counts[n]) for n in chosen}
        serving.step({n: counts[n] for n in order}, drafts=chosen, accepted=accepted)
        for name in [
            name for name, each in serving.requests.items() if each.done >= 50 or rng.random() < 0.1
        ]:
            serving.remove(name)


_SCHEDULES: dict[str, tuple[Callable[[Target, LayerSpec], None], str, Feature]] = {
    "prompts": (
        _prompts,
        "prompts of several lengths, and decodes after them, are as the oracle has them",
        Feature(0),
    ),
    "strong": (_strong, "decays that leave nothing of a state give finite, right numbers", Feature(0)),
    "resets": (_resets, "tokens that leave nothing of a state change no decay of later tokens", Feature(0)),
    "large": (
        _large,
        "a prompt of 300 tokens and steps of 40 requests are as the oracle has them",
        Feature(0),
    ),
    "strided": (_strided, "inputs may be strided views", Feature(0)),
    "chunks": (_chunks, "any split of a prompt into steps gives the outputs of one run", Feature(0)),
    "decodes": (_decodes, "decodes in any order start from the state of their own request", Feature(0)),
    "mixed": (_mixed, "new, idle, removed and decoding requests share steps", Feature(0)),
    "repeats": (_repeats, "a step on two pages can be repeated, with equal bits", Feature(0)),
    "dummies": (_dummies, "steps of padding read no page and change none", Feature(0)),
    "graphs": (_graphs, "steps replay on the pages of each, and a capture changes none", Feature(0)),
    "drafts": (_drafts, "rejected drafts leave the state of the accepted tokens", Feature.STATE_DRAFTS),
    "checkpoints": (_checkpoints, "requests start from states kept at borders", Feature.STATE_CHECKPOINTS),
    "random": (_random, "a random schedule gives the outputs of one run of each request", Feature(0)),
}
