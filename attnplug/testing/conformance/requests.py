"""Each request is attended by itself: whoever stands beside it, and however it came to its tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from attnplug.core.errors import BatchError
from attnplug.core.features import Feature
from attnplug.core.spec import Phase
from attnplug.registry.plugin_calls import guarded_call
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.driving import Answer
from attnplug.testing.conformance.guarded import GuardedCache, slots_of
from attnplug.testing.conformance.phases import in_phase, of_phase
from attnplug.testing.conformance.single_layer import SingleLayer, blank, matches_oracle
from attnplug.testing.conformance.situations import PAGED, only, situations, step
from attnplug.testing.conformance.steps import decodes, kinds, layer_of_kind, mixed, step_of
from attnplug.testing.conformance.target import Target

__all__ = ["checks"]


def checks(target: Target) -> Iterator[Check]:
    """The checks of requests, in each situation; of pieces, for each kind of layer."""
    features = target.backend.features
    for situation in PAGED:
        for name, (run, summary) in _CHECKS.items():
            yield Check(f"batch/{name}-{situation}", functools.partial(run, target, situation), summary)
    for kind in kinds(target):
        summary = "a prefill in pieces gives what it gives at once"
        yield Check(f"batch/pieces-{kind}", functools.partial(_check_pieces, target, kind), summary)
    for situation in situations(target):
        if situation != "encoder":  # which is not causal
            run_widened = functools.partial(_check_widened, target, situation)
            summary = "causal=False does not widen a causal layer: it is refused"
            yield Check(f"batch/widened-{situation}", run_widened, summary)
        if Feature.NON_CAUSAL in features:
            run_narrowed = functools.partial(_check_narrowed, target, situation)
            yield Check(
                f"batch/narrowed-{situation}", run_narrowed, "causal=True narrows a layer that is not causal"
            )


def _check_alone(target: Target, situation: str) -> None:
    make = step(target, situation)
    for index in range(len(make().seq_lens)):
        batch = only(make(), [index])
        new = batch.common.num_actual_tokens
        if not in_phase(target.phase, [new]):
            continue
        what = f"request {index} of the batch alone, with {new} new tokens of {batch.seq_lens[0]}"
        matches_oracle(batch, SingleLayer.of(target, batch).forward(batch, what=what), what)


def _check_order(target: Target, situation: str) -> None:
    make = step(target, situation)
    whole = make()
    parts = SingleLayer.of(target, whole)
    lens = whole.common.query_start_loc_cpu.diff().tolist()
    threshold = parts.builder.reorder_batch_threshold
    for order in (list(range(len(lens)))[::-1], [2, 0, 3, 1]):
        if threshold is not None:
            order.sort(key=lambda index: lens[index] > threshold)
        if target.phase is Phase.PREFILL:
            order.sort(key=lambda index: lens[index] <= 1)
        batch, what = only(make(), order), f"with the requests in the order {order}"
        matches_oracle(batch, parts.forward(batch, what=what), what)


def _check_idle(target: Target, situation: str) -> None:
    spec = step(target, situation)().spec
    size = target.block_size(spec)
    last = 1 if situation == "decode" else size + 3
    for new, all_tokens in (
        ([0, 1, 0, 1, last], [size, size + 3, 0, 5, 2 * size]),
        ([0, 0], [size, 2 * size + 1]),
        ([0], [0]),
    ):
        if not in_phase(target.phase, of_phase(target.phase, new, all_tokens)[0]):
            continue  # a step without new tokens is no prefill
        batch = target.batch(spec, new, all_tokens, padding=2)
        what = f"with requests of {new} new tokens"
        matches_oracle(batch, SingleLayer.of(target, batch).forward(batch, what=what), what)


def _check_nobody(target: Target, situation: str) -> None:
    if target.phase is Phase.PREFILL:
        raise CheckSkipped(f"{target.name} serves prefill only, and a step without requests is none")
    whole = step(target, situation)()
    guarded = GuardedCache.of(target.backend, whole)
    empty = only(guarded.batch, [])
    common = dataclasses.replace(empty.common, slot_mapping=whole.common.slot_mapping[:0])
    # Rows of padding, as they are where every request has finished.
    rows = {name: getattr(whole, name)[-3:] for name in ("query", "key", "value")}
    for what, batch in (
        ("without any request", dataclasses.replace(empty, common=common)),
        ("with padding rows only", dataclasses.replace(empty, common=common, **rows)),
    ):
        found = SingleLayer.of(target, whole).forward(batch, blank(batch, 3.0), what)
        if bool((found.output != 3.0).any()):
            raise ConformanceError(f"{what}: forward wrote to the output")
        guarded.expect_only(slots_of(batch), f"{what}: forward")


def _check_state(target: Target, situation: str) -> None:
    spec = target.spec()
    size = target.block_size(spec)
    own, other = (decodes, mixed) if situation == "decode" else (mixed, decodes)
    # As many requests each time, so that what is kept by their number is found out.
    steps = [own(size), other(size, size), own(size, size + 5), own(size)]
    makes = [step_of(target, spec, lengths, seed) for seed, lengths in enumerate(steps)]
    makes.append(lambda: only(makes[2](), [0 if target.phase is Phase.PREFILL else 1]))
    parts = SingleLayer.of(target, makes[0]())
    for number, make in enumerate(makes, 1):
        batch = make()
        what = f"in step {number} of one impl and builder, after other batches"
        matches_oracle(batch, parts.forward(batch, what=what), what)


def _check_pieces(target: Target, kind: str) -> None:
    spec = layer_of_kind(target, kind)
    size = target.block_size(spec)
    total = 3 * size + 5
    whole = target.batch(spec, [total], [total], exact=True)
    parts = SingleLayer.of(target, whole)
    # A second piece of one token, unless that is a decode which the backend does not serve.
    ends = (size - 1, size + (2 if target.phase else 0), 2 * size + 3, total)
    what = f"prefilling {total} tokens in pieces that end at {', '.join(map(str, ends))}"
    pieces = (_piece(whole, start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True))
    outputs = [parts.forward(piece, what=what).output for piece in pieces]
    matches_oracle(whole, Answer(torch.cat(outputs), None), what)


def _piece(whole: Batch, start: int, end: int) -> Batch:
    """The tokens `start .. end - 1` of a batch of one request, those before them in the cache."""
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
    )
    return dataclasses.replace(
        whole, common=common, query=whole.query[rows], key=whole.key[rows], value=whole.value[rows]
    )


def _check_narrowed(target: Target, situation: str) -> None:
    batch = step(target, situation, causal=False)()
    if situation == "decode":
        # The last token sees the same keys either way.
        batch = target.batch(batch.spec, *decodes(target.block_size(batch.spec), new=3), padding=3)
    batch = _causal(batch, True)
    what = "with causal=True in the batch of a layer with causal=False"
    found = SingleLayer.of(target, batch).forward(batch, what=what)
    _, problem = guarded_call(matches_oracle, batch, found, what)
    if problem is not None:
        _, other = guarded_call(matches_oracle, _causal(batch, False), found, what)
        named = "causal=True ignored" if other is None else None
        likely = f"; these are the numbers of a known mistake: {named}" if named else ""
        raise ConformanceError(f"{problem}{likely}", named) from None


def _check_widened(target: Target, situation: str) -> None:
    batch = _causal(step(target, situation)(), False)
    try:
        SingleLayer.of(target, batch).forward(batch)
    except ConformanceError as problem:
        if isinstance(problem.__cause__, BatchError):
            return
        raise ConformanceError(
            f"causal=False for a causal layer must raise a BatchError: {problem}"
        ) from problem
    raise ConformanceError("causal=False for a causal layer was taken; it must raise a BatchError")


def _causal(batch: Batch, causal: bool) -> Batch:
    return dataclasses.replace(batch, common=dataclasses.replace(batch.common, causal=causal))


_CHECKS: dict[str, tuple[Callable[[Target, str], None], str]] = {
    "alone": (_check_alone, "each request alone gives what it gives in the batch"),
    "order": (_check_order, "the order of the requests changes nothing"),
    "idle": (_check_idle, "requests without new tokens are legal, and give nothing"),
    "nobody": (_check_nobody, "a step without requests writes nothing"),
    "no-state": (_check_state, "nothing of a step is left in the next"),
}
