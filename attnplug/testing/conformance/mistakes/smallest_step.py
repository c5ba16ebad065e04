"""Shrinks a step with a wrong answer to one with fewer requests, tokens, heads and features that is still wrong."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from attnplug.core.errors import SpecError
from attnplug.core.spec import AttentionType
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.batches import StepArguments
from attnplug.testing.conformance.check import ConformanceError
from attnplug.testing.conformance.mistakes.deviation import Deviation
from attnplug.testing.conformance.mistakes.mistake_recognition import recognise
from attnplug.testing.conformance.mistakes.single_step import SPEC_DEFAULTS, step_test, wrong_step
from attnplug.testing.conformance.target import layer_fields

_FEW = 32
"""All smaller numbers are tried of one as small as this."""
_MOST_SIZES = 4
_MOST_REQUESTS = 8
_OF_REQUESTS = ("key_lens", "spans")
"""Options of a batch with a value for each request."""

_Pass: TypeAlias = Callable[[StepArguments, Deviation], Iterator[StepArguments]]


class SmallestStep(NamedTuple):
    """The smallest step that was found to fail.

    Args:
        step: its arguments.
        test: a test that runs it.
        is_least: whether nothing smaller of it fails; False if the time ended before all was tried.
    """

    step: StepArguments
    test: str
    is_least: bool

    @property
    def words(self) -> str:
        """The size: "1 request of 3 tokens"."""
        requests, tokens = len(self.step.seq_lens), sum(self.step.seq_lens)
        nouns = ("request" if requests == 1 else "requests", "token" if tokens == 1 else "tokens")
        least = "" if self.is_least else ", when the time to shrink it ended"
        return f"{requests} {nouns[0]} of {tokens} {nouns[1]}{least}"


def smallest_step(step: StepArguments, mistake: str | None, seconds: float) -> SmallestStep | None:
    """The smallest step that still gives the wrong answer of `mistake`, or any if it is None, within `seconds`.

    None if the step is right when it runs alone: the failure is then of the calls around it.
    """
    # Greedy, without a library: what hypothesis shrinks it must have drawn itself, and it does not draw a step over
    # 5,003 keys in some seconds. A smaller step here is always nearer to the least, so the result has no luck in it.
    end = time.monotonic() + seconds
    wrong = _wrong(step, mistake)
    if wrong is None and mistake is not None:
        # A mistake of one check has a name that no step alone can have.
        mistake, wrong = None, _wrong(step, None)
    if wrong is None:
        return None
    tried, before = [step], None
    while before != step:
        before = step
        for candidates in _PASSES:
            found: tuple[StepArguments, Deviation] | None = (step, wrong)
            while found is not None:
                (step, wrong), found = found, None
                for smaller in candidates(step, wrong):
                    if smaller in tried:
                        continue
                    if time.monotonic() > end:
                        return SmallestStep(step, step_test(step, mistake), is_least=False)
                    tried.append(smaller)
                    if answer := _wrong(smaller, mistake):
                        found = (smaller, answer)
                        break
    return SmallestStep(step, step_test(step, mistake), is_least=True)


class Shrinker:
    """Shrinks the first failure of each mistake, within `seconds` for all; each takes at most half of what is left."""

    def __init__(self, seconds: float) -> None:
        self._left, self._known = seconds, set[str]()

    def shrink(self, problem: Exception) -> None:
        """Add the smallest failing step, and a note with its test, to an error of a wrong answer."""
        if not isinstance(problem, ConformanceError) or problem.step is None or self._left <= 0:
            return
        if problem.says in self._known:
            return
        self._known.add(problem.says)
        start = time.monotonic()
        problem.smallest = smallest_step(problem.step, problem.named, self._left / 2)
        self._left -= time.monotonic() - start
        if problem.smallest is not None:
            problem.add_note(f"smallest failing step, {problem.smallest.words}:\n\n{problem.smallest.test}\n")


def _wrong(step: StepArguments, mistake: str | None) -> Deviation | None:
    """The wrong answer of a step; None if it is right, of another mistake, refused, or an error."""
    if step.target.reasons(step.spec):
        return None
    # An error is another failure than a wrong answer.
    wrong: Deviation | None = guarded_call(wrong_step, step)[0]
    if wrong is None or mistake is None or recognise(wrong, only=mistake).name == mistake:
        return wrong
    return None


def _together(step: StepArguments, wrong: Deviation) -> Iterator[StepArguments]:
    """All requests as short as can be, or half as long, so that all that follows takes less time."""
    lens = list(zip(step.query_lens, step.seq_lens, strict=True))
    few = [[(min(new, 1), min(total, count)) for new, total in lens] for count in (1, 2)]
    half = [((new + 1) // 2, (new + 1) // 2 + (total - new) // 2) for new, total in lens]
    for candidate in (*few, half):
        found = step
        for index, (new, total) in enumerate(candidate):
            found = _of_lengths(found, index, new, total)
        yield found


def _requests(step: StepArguments, wrong: Deviation) -> Iterator[StepArguments]:
    """One wrong request, then all but some."""
    bad = [index for index, rows in enumerate(wrong.spans) if bool(wrong.wrong[rows].any())]
    for index in sorted(bad, key=lambda request: step.seq_lens[request])[:_MOST_REQUESTS]:
        yield _of_requests(step, [index])
    count = len(step.seq_lens)
    size = count // 2
    while size:
        for start in range(0, count, size):
            yield _of_requests(step, [each for each in range(count) if not start <= each < start + size])
        size //= 2


def _of_requests(step: StepArguments, kept: Sequence[int]) -> StepArguments:
    options = dict(step.options)
    for name in _OF_REQUESTS:
        if options.get(name) is not None:
            options[name] = [options[name][index] for index in kept]
    new, tokens = (tuple(values[index] for index in kept) for values in (step.query_lens, step.seq_lens))
    return dataclasses.replace(step, query_lens=new, seq_lens=tokens, options=options)


def _tokens(step: StepArguments, wrong: Deviation) -> Iterator[StepArguments]:
    """Shorter queries and contexts, of the longest requests first."""
    order = sorted(range(len(step.seq_lens)), key=lambda request: -step.seq_lens[request])
    is_cross = step.spec.attn_type is AttentionType.ENCODER_DECODER
    for index in order:
        new, total = step.query_lens[index], step.seq_lens[index]
        if is_cross:
            yield from (_of_lengths(step, index, new, each) for each in _smaller(total, 1))
        else:
            yield from (_of_lengths(step, index, each, total - new + each) for each in _smaller(new, 1))
            yield from (_of_lengths(step, index, new, new + each) for each in _smaller(total - new, 0))
        yield from (_of_lengths(step, index, each, total) for each in _smaller(new, 1))


def _of_lengths(step: StepArguments, index: int, new: int, total: int) -> StepArguments:
    """The step with other lengths of one request."""
    options, lens = dict(step.options), []
    if options.get("key_lens") is not None:
        keys = list(options["key_lens"])
        # The first keys that a request has not are those that its window has passed.
        keys[index] = max(keys[index] - max(step.seq_lens[index] - total, 0), min(new, total))
        options["key_lens"] = keys
    for values, value in ((step.query_lens, new), (step.seq_lens, total)):
        lens.append((*values[:index], value, *values[index + 1 :]))
    return dataclasses.replace(step, query_lens=lens[0], seq_lens=lens[1], options=options)


def _smaller(value: int, least: int) -> Iterator[int]:
    """Numbers from `least` on that are less than `value`: all of a small one, else ever nearer ones."""
    if value <= _FEW:
        yield from range(least, value)
        return
    # Halves, quarters and so on keep what is a multiple of a power of two.
    parts = itertools.takewhile(bool, (value >> shift for shift in itertools.count()))
    yield from dict.fromkeys(max(value - part, least) for part in parts)


def _layers(step: StepArguments, wrong: Deviation) -> Iterator[StepArguments]:
    """Layers with a default in the place of a value, then with smaller limits, fewer heads and smaller sizes."""
    spec = step.spec
    for changes in _changes(step):
        try:
            changed = spec.replace(**changes)
        except SpecError:
            continue
        options = dict(step.options)
        if spec.direct_kv and not changed.direct_kv:
            options.pop("key_lens", None)
        yield dataclasses.replace(step, spec=changed, options=options)


def _changes(step: StepArguments) -> Iterator[dict[str, Any]]:
    spec, target = step.spec, step.target
    # float32 has the narrowest bounds, and so shows a mistake in the fewest tokens.
    for name, plain in {**SPEC_DEFAULTS, "dtype": "float32"}.items():
        if name not in spec.derived and getattr(spec, name, plain) != plain:
            yield {name: plain}
    left, right = spec.window
    yield from ({"window": (each, right)} for each in _smaller(left, 0))
    yield from ({"window": (left, each)} for each in _smaller(right, 0))
    if spec.chunk_size is not None:
        yield from ({"chunk_size": each} for each in _smaller(spec.chunk_size, 1))
    group = spec.num_heads // spec.num_kv_heads
    pairs = ((1, 1), (2, 1), (2, 2), (group, 1), (spec.num_kv_heads,) * 2, (2 * group, 2))
    for heads, kv_heads in pairs:
        if (heads, kv_heads) < (spec.num_heads, spec.num_kv_heads):
            yield {"num_heads": heads, "num_kv_heads": kv_heads}
    if spec.mla is not None:
        for dims in sorted(target.latents, key=lambda dims: dims.latent_size)[:_MOST_SIZES]:
            if dims.latent_size < spec.head_size:
                yield layer_fields({"mla": dims})
    else:
        sizes = sorted(target.head_sizes)
        yield from ({"head_size": size} for size in sizes[:_MOST_SIZES] if size < spec.head_size)
        yield from ({"head_size_v": size} for size in sizes[:_MOST_SIZES] if size < spec.head_size_v)


def _values(step: StepArguments, wrong: Deviation) -> Iterator[StepArguments]:
    """Smaller pages, and numbers, scales and settings that are the defaults."""
    size = step.options.get("block_size", 0)
    for each in sorted(each for each in step.target.block_sizes if each < size):
        spec = step.spec if step.spec.block_size is None else step.spec.replace(block_size=each)
        yield dataclasses.replace(step, spec=spec, options={**step.options, "block_size": each})
    for name in step.options:
        if name not in ("block_size", "key_lens"):
            yield dataclasses.replace(
                step, options={option: each for option, each in step.options.items() if option != name}
            )
    if step.config:
        yield dataclasses.replace(step, config={})


# A step of small heads takes a fraction of the time, so they come before tokens.
_PASSES: tuple[_Pass, ...] = (_together, _requests, _layers, _tokens, _values)
