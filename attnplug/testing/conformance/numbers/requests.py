"""The answer to a request depends neither on other requests nor on how its tokens were computed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import torch

from attnplug.core.batch.host import optional_rows
from attnplug.core.features import Feature
from attnplug.core.spec import AttentionType, Phase
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import (
    decode_lengths,
    layer_of_kind,
    mixed_lengths,
    paged_kinds,
    paged_scenarios,
    scenario_factory,
    scenario_layer,
    scenarios,
    select_requests,
    step_factory,
)
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckTable,
    ConformanceError,
    SkipKind,
    checks_from,
)
from attnplug.testing.conformance.harness import Harness, Output, blank_output
from attnplug.testing.conformance.mistakes.expectations import (
    StepMistake,
    difference,
    expect_batch_refused,
    expect_correct,
    expect_correct_step,
    stale_mistakes,
)
from attnplug.testing.conformance.numbers.cache_reads import GuardedCache, slots_of
from attnplug.testing.conformance.target import Target, in_phase, of_phase


def checks(target: Target) -> Iterator[Check]:
    """The checks of requests in each scenario, and of pieces for each kind of layer."""
    features = target.backend.features
    for scenario in paged_scenarios(target):
        yield from checks_from(_CHECKS, "batch", target, scenario)
    for kind in paged_kinds(target):
        summary = "a prefill in pieces gives the result of a prefill at once"
        yield Check.of(f"batch/pieces-{kind}", summary, _check_pieces, target, kind)
    for scenario in scenarios(target):
        summary = "a batch with causal=None leaves causality to the layer"
        yield Check.of(f"batch/unstated-{scenario}", summary, _check_unstated, target, scenario)
        if scenario != "encoder":  # an encoder is not causal
            summary = "a causal layer refuses causal=False"
            yield Check.of(f"batch/widened-{scenario}", summary, _check_widened, target, scenario)
        if Feature.MM_PREFIX in features:
            summary = "a layer with mm_prefix refuses a step without spans"
            yield Check.of(f"batch/no-spans-{scenario}", summary, _check_no_spans, target, scenario)
            summary = "a layer with mm_prefix serves a step of text"
            yield Check.of(f"batch/text-{scenario}", summary, _check_text, target, scenario)
        if Feature.NON_CAUSAL in features and scenario != "encoder":
            summary = "causal=True applies to a layer with causal=False"
            yield Check.of(f"batch/narrowed-{scenario}", summary, _check_narrowed, target, scenario)


def _check_alone(target: Target, scenario: str) -> None:
    make = scenario_factory(target, scenario)
    for index in range(len(make().seq_lens)):
        batch = select_requests(make(), [index])
        new = batch.common.num_actual_tokens
        if not in_phase(target.phase, [new]):
            continue
        what = f"request {index} of the batch alone, with {new} new tokens of {batch.seq_lens[0]}"
        expect_correct(batch, Harness.of(target, batch).forward(batch, what=what), what)


def _check_order(target: Target, scenario: str) -> None:
    make = scenario_factory(target, scenario)
    whole = make()
    harness = Harness.of(target, whole)
    lens = whole.common.query_start_loc_cpu.diff().tolist()
    threshold = harness.builder.reorder_batch_threshold
    for order in (list(range(len(lens)))[::-1], [2, 0, 3, 1]):
        if threshold is not None:
            # An engine sorts the short requests first for such a builder, and the sort keeps the rest of
            # the order.
            order.sort(key=lambda index: lens[index] > threshold)
        if target.phase is Phase.PREFILL:
            order.sort(key=lambda index: lens[index] <= 1)
        batch, what = select_requests(make(), order), f"with the requests in the order {order}"
        expect_correct(batch, harness.forward(batch, what=what), what)


def _check_idle(target: Target, scenario: str) -> None:
    spec = scenario_factory(target, scenario)().spec
    size = target.block_size(spec)
    last = 1 if scenario == "decode" else size + 3
    for new, all_tokens in (
        ([0, 1, 0, 1, last], [size, size + 3, 0, 5, 2 * size]),
        # As many tokens as requests, though they are no decodes.
        ([0, 2, 1, 1], [size, size + 3, 5, 2 * size]),
        ([0, 0], [size, 2 * size + 1]),
        ([0], [0]),
    ):
        if not in_phase(target.phase, of_phase(target.phase, new, all_tokens)[0]):
            continue  # a step without new tokens is not a prefill
        batch = target.batch(spec, new, all_tokens, padding=2)
        what = f"with requests of {new} new tokens"
        expect_correct(batch, Harness.of(target, batch).forward(batch, what=what), what)


def _check_no_requests(target: Target, scenario: str) -> None:
    if target.phase is Phase.PREFILL:
        raise CheckSkipped(
            f"{target.name} serves prefill only, and a step without requests is not one", SkipKind.PHASE
        )
    whole = scenario_factory(target, scenario)()
    guarded = GuardedCache.of(target.backend, whole)
    empty = select_requests(guarded.batch, [])
    common = dataclasses.replace(empty.common, slot_mapping=whole.common.slot_mapping[:0])
    # An engine may pad a step without requests.
    rows = {name: getattr(whole, name)[-3:] for name in ("query", "key", "value")}
    empty = dataclasses.replace(empty, common=common)
    padded = dataclasses.replace(empty, **rows)
    for what, batch in (("without any request", empty), ("with padding rows only", padded)):
        found = Harness.of(target, whole).forward(batch, blank_output(batch, 3.0), what)
        if bool((found.output != 3.0).any()):
            raise ConformanceError(f"{what}: forward wrote to the output")
        guarded.expect_only_written(slots_of(batch), f"{what}: forward")


def _check_state(target: Target, scenario: str) -> None:
    spec = scenario_layer(target, scenario)
    size = target.block_size(spec)
    own, other = (decode_lengths, mixed_lengths) if scenario == "decode" else (mixed_lengths, decode_lengths)
    # The same number of requests each time, since a builder may keep state by that number.
    steps = [own(size), other(size, size), own(size, size + 5), own(size)]
    makes = [step_factory(target, spec, lengths, seed) for seed, lengths in enumerate(steps)]
    makes.append(lambda: select_requests(makes[2](), [0 if target.phase is Phase.PREFILL else 1]))
    harness = Harness.of(target, makes[0]())
    mistakes: dict[str, StepMistake] = {}
    for number, make in enumerate(makes, 1):
        batch = make()
        what = f"in step {number} of one impl and builder, after other batches"
        found, tokens = harness.forward(batch, what=what), batch.common.num_actual_tokens
        own_rows = Output(found.output[:tokens], None if found.lse is None else found.lse[:tokens])
        expect_correct_step(target, make, own_rows, what, mistakes)
        # A builder may keep the first step, or the one before.
        kept = {f"{name}, of step {number}": change for name, change in stale_mistakes(batch.common).items()}
        mistakes = kept | {name: mistakes[name] for name in mistakes if name.endswith("of step 1")}


def _check_pieces(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind, paged=True)
    if not spec.causal:
        raise CheckSkipped(f"{target.name} serves no causal layer of this kind", SkipKind.LAYER)
    total = 3 * size + 5
    # The second piece is one token, a decode, unless the backend serves one phase only.
    ends = (size - 1, size + (2 if target.phase else 0), 2 * size + 3, total)
    # A span is computed as a whole, so each piece is one.
    spans = [list(itertools.pairwise((0, *ends)))] if spec.mm_prefix else None
    whole = target.batch(spec, [total], [total], exact=True, spans=spans)
    harness = Harness.of(target, whole)
    what = f"prefilling {total} tokens in pieces that end at {', '.join(map(str, ends))}"
    pieces = (piece(whole, start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True))
    outputs = [harness.forward(piece, what=what).output for piece in pieces]
    expect_correct(whole, Output(torch.cat(outputs), None), what)


def piece(whole: Batch, start: int, end: int) -> Batch:
    """The step of the tokens `start .. end - 1` of a batch of one request, after the earlier ones."""
    device, rows = whole.query.device, slice(start, end)
    starts = torch.tensor([0, end - start], dtype=torch.int32)
    host = torch.tensor([end], dtype=torch.int32)
    common = dataclasses.replace(
        whole.common,
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=host.to(device),
        seq_lens_host=host.numpy(),
        num_actual_tokens=end - start,
        max_query_len=end - start,
        max_seq_len=end,
        slot_mapping=whole.common.slot_mapping[rows],
        **optional_rows(whole.common, slice(None), rows),
    )
    return dataclasses.replace(
        whole, common=common, query=whole.query[rows], key=whole.key[rows], value=whole.value[rows]
    )


def _check_narrowed(target: Target, scenario: str) -> None:
    batch = _without_selection(scenario_factory(target, scenario, causal=False)())
    if batch.spec.attn_type is AttentionType.ENCODER_DECODER:
        raise CheckSkipped("no step narrows a cross layer: its keys are the encoder's", SkipKind.LAYER)
    if scenario == "decode":
        # A single last token sees the same keys with and without a causal mask.
        batch = target.batch(batch.spec, *decode_lengths(target.block_size(batch.spec), new=3), padding=3)
    batch = _causal(batch, True)
    what = "with causal=True in the batch of a layer with causal=False"
    found = Harness.of(target, batch).forward(batch, what=what)
    wide = _causal(batch, False)
    expect_correct(batch, found, what, lambda: None if difference(wide, found) else "causal=True ignored")


def _check_unstated(target: Target, scenario: str) -> None:
    own = scenario_factory(target, scenario)()
    batches = [own]
    if own.spec.causal and Feature.NON_CAUSAL in target.backend.features:
        with contextlib.suppress(CheckSkipped):
            batches.append(_without_selection(scenario_factory(target, scenario, causal=False)()))
    for batch in batches:
        unstated = dataclasses.replace(batch, common=dataclasses.replace(batch.common, causal=None))
        what = f"with causal=None in the batch of a layer with causal={batch.spec.causal}"
        found = Harness.of(target, unstated).forward(unstated, what=what)
        expect_correct(batch, found, what, functools.partial(_taken_for_causal, batch, found))


def _taken_for_causal(batch: Batch, found: Output) -> str | None:
    """The mistake, if the answer is that of a causal layer, and the layer is none."""
    if batch.spec.causal or batch.spec.is_encoder or difference(_causal(batch, True), found):
        return None
    return "common.causal=None taken for True, not for what the layer says"


def _check_widened(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario)()
    if not batch.spec.causal:
        raise CheckSkipped(f"{target.name} serves no causal layer here", SkipKind.LAYER)
    batch = _causal(batch, False)
    expect_batch_refused(target, batch, "causal=False for a causal layer")


def _check_no_spans(target: Target, scenario: str) -> None:
    given = scenario_factory(target, scenario, mm_prefix=True)()
    common = dataclasses.replace(given.common, mm_prefix_spans=None, mm_prefix_spans_cpu=None)
    batch, what = dataclasses.replace(given, common=common), "mm_prefix_spans=None for a layer with mm_prefix"
    expect_batch_refused(target, batch, what)
    harness = Harness.of(target, given)
    harness.forward(given)
    expect_batch_refused(target, batch, f"{what}, after a step with spans,", harness)


def _check_text(target: Target, scenario: str) -> None:
    batch = _without_selection(scenario_factory(target, scenario, mm_prefix=True)())
    common, zeros = batch.common, torch.zeros(batch.common.num_actual_tokens, 2, dtype=torch.int32)
    common = dataclasses.replace(
        common, mm_prefix_spans=zeros.to(batch.query.device), mm_prefix_spans_cpu=zeros
    )
    text = dataclasses.replace(batch, common=common, spans=[[] for _ in batch.seq_lens])
    what = "with a step of text for a layer with mm_prefix"
    expect_correct(text, Harness.of(target, text).forward(text, what=what), what)


def _without_selection(batch: Batch) -> Batch:
    if batch.spec.sparse is not None:
        # Fewer visible keys need another selection; the cases of `correct` have them.
        raise CheckSkipped("the selection of a sparse layer is drawn for what its queries see")
    return batch


def _causal(batch: Batch, causal: bool) -> Batch:
    return dataclasses.replace(batch, common=dataclasses.replace(batch.common, causal=causal))


_CHECKS: CheckTable = {
    "alone": (_check_alone, "each request alone gives the same result as in the batch"),
    "order": (_check_order, "the order of the requests does not change their results"),
    "idle": (_check_idle, "requests without new tokens are served, and have no output rows"),
    "nobody": (_check_no_requests, "a step without requests writes nothing"),
    "no-state": (_check_state, "a step does not depend on the steps before"),
}
