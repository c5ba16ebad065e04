"""The thirteen kinds of mistakes that the kit looks for, with the checks that find each, and what a run proves of them."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from attnplug.testing.conformance.check import SkipKind

if TYPE_CHECKING:
    from attnplug.testing.isolation.results import Result


@dataclasses.dataclass(frozen=True, slots=True)
class MistakeKind:
    """One kind of mistakes.

    Args:
        name: in a table for people.
        checks: patterns of the ids of the checks that find such a mistake. A check may find several kinds.
        features: declared features without which a part of the kind cannot be tried.
        on_gpu: what only the checks `gpu/...` try, which need a GPU; "" if there are none.
    """

    name: str
    checks: tuple[str, ...]
    features: tuple[str, ...] = ()
    on_gpu: str = ""

    def has(self, check: str) -> bool:
        """Whether a check finds mistakes of this kind."""
        # Ids of a class that serves other layers under the name begin with a word of their own, such as "mla/".
        own = "/".join(check.split("/")[-2:])
        return any(fnmatch.fnmatchcase(own, pattern) for pattern in self.checks)


def _correct(*values: str) -> tuple[str, ...]:
    """The numeric cases whose layer or batch has one of the values."""
    return tuple(f"correct/*-{value}" for value in values)


MISTAKE_KINDS: tuple[MistakeKind, ...] = (
    MistakeKind(
        "masks and limits",
        (
            *_correct("window*", "chunk*", "spans*", "non_causal*", "narrowed*", "token_topk*", "block_*"),
            *(f"batch/{name}-*" for name in ("unstated", "widened", "narrowed", "text", "no-spans")),
            *(f"declared/feature-{name}" for name in ("sliding_window", "chunked_local", "mm_prefix")),
            *("selection/*", "declared/feature-non_causal", "declared/s*", "tensors/sees-nothing-*"),
        ),
        ("sliding_window", "chunked_local", "mm_prefix", "sparse", "non_causal"),
    ),
    MistakeKind(
        "softmax, scale and sinks",
        (
            *_correct("cap*", "sinks*", "alibi*", "lse*", "scale*", "far", "sharp", "wide"),
            *_correct("zeros", "equal", "negative", "tiny", "beyond", "each"),
            *(f"declared/feature-{name}" for name in ("soft_cap", "sinks", "alibi", "lse")),
            *("tensors/sinks-*", "tensors/alibi_slopes-*", "tensors/lse-*", "declared/can_return_lse*"),
        ),
        ("soft_cap", "sinks", "alibi", "lse"),
    ),
    MistakeKind(
        "heads and head sizes",
        (
            *_correct("h[!4]x*", "h[0-9][0-9]x*", "h4x[!2]*", "d[!6]*", "d6[!4]*", "v[0-9]*", "p[0-9]*"),
            *(
                "correct/*-joint*",
                "declared/head_size-*",
                "declared/feature-head_size_v",
                "declared/feature-mla",
            ),
        ),
        ("head_size_v",),
    ),
    MistakeKind(
        "cache writes",
        tuple(
            f"cache/{name}*"
            for name in ("only-slots", "attend-only", "negative-slots", "sharing", "written", "stored")
        ),
    ),
    MistakeKind(
        "cache reads and pages",
        (
            *_correct("b[!1]*", "b1-*", "b1[!6]*", "HND*", "apart*", "rows[0-9]*"),
            *(
                f"cache/{name}*"
                for name in ("unused", "table", "null", "layout", "strided", "block-size", "far")
            ),
            *("correct/far-*", "declared/block_size-*", "declared/layout-*"),
        ),
    ),
    MistakeKind(
        "storage types and dtypes",
        (
            *_correct(
                "float16*",
                "bfloat16*",
                "float32-float*",
                "float32-bfloat*",
                "fp8*",
                "int8*",
                "*nvfp4*",
                "*rotated4*",
                "range",
            ),
            *(
                "cache/stored-*",
                "cache/clamped-*",
                "cache/scales-*",
                "declared/dtype-*",
                "declared/kv_cache_dtype-*",
                "format/*",
            ),
            *("tensors/unused-scales-*", "tensors/scales-*", "tensors/quantised-*", "tensors/output-scale*"),
            *("declared/feature-fp8_kv", "declared/feature-head_scales"),
        ),
        ("fp8_kv", "head_scales"),
    ),
    MistakeKind(
        "requests and lengths",
        (
            *("correct/[!m]*", "correct/many-*", *_correct("direct*", "encoder*", "cross*", "strangers")),
            *("correct/mixed-h4x2-d64-float32-b16-NHD", "correct/mixed-h4x[12]-d*-float32-b*-NHD"),
            *(f"batch/{name}-*" for name in ("alone", "order", "idle", "nobody", "pieces", "cross")),
            *(f"declared/feature-{name}" for name in ("direct_kv", "cross", "encoder", "invariance")),
            *("invariance/*", "forest/*", "tree/*", *_correct("invariance_*")),
            *("declared/phase-*", "declared/attn_type-*"),
        ),
        ("direct_kv", "cross", "encoder", "invariance"),
    ),
    MistakeKind(
        "builders and metadata",
        ("builder/[!ca]*", "builder/common-*", "tensors/misfits-*", "composite/*"),
    ),
    MistakeKind(
        "graphs and buffers",
        (
            *(
                "gpu/*",
                "builder/captured",
                "builder/cudagraph-*",
                "state/refilled-*",
                "state/outputs-apart-*",
            ),
            *(f"tensors/{name}-*" for name in ("refilled", "strided", "inputs", "padding", "same")),
            *("tensors/output-[!s]*", "tensors/lse-padding", "tensors/lse-left-out-*"),
        ),
        on_gpu="capture and replay of CUDA graphs",
    ),
    MistakeKind(
        "state across steps and layers",
        (
            *(
                "layers/*",
                "runtime/*",
                "batch/no-state-*",
                "batch/after-*",
                "batch/chain-*",
                "builder/after-*",
            ),
            *(
                "state/like-layers-*",
                "state/dropped-layers-*",
                "cache/cross-later-steps",
                "tensors/deterministic-*",
            ),
        ),
    ),
    MistakeKind("states of requests", ("states/*",), ("state",)),
    MistakeKind("ranks and merging", ("merge/*", "context_parallel/*"), ("lse",)),
    MistakeKind(
        "declarations and process",
        (
            *(
                "declaration/*",
                "refused/*",
                "options/*",
                "listed/*",
                "declared/any-layer",
                "declared/device-types",
            ),
            *(f"state/{name}*" for name in ("settings", "no-grad", "grad", "inference", "all-in", "default")),
            *("state/three-threads", "state/uninitialised-memory", "state/memory-*", "state/prints-nothing"),
            "correct/untried-*",
        ),
    ),
)
"""All kinds, in the order of a table for people."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProvenKind:
    """What a run proves of one kind of mistakes.

    Args:
        kind: its name.
        verdict: "passed", "failed", or "untested" if no check of it passed or failed.
        passed: checks that passed.
        failed: checks that failed, also as known.
        untested: what was not tried here, and why.
    """

    kind: str
    verdict: str
    passed: int
    failed: int
    untested: tuple[str, ...]


def proven_kinds(results: Iterable[Result], ids: Sequence[str]) -> list[ProvenKind]:
    """What the results of some of the checks `ids` prove of each kind."""
    found = list(results)
    return [_proven(kind, [each for each in found if kind.has(each.id)], ids) for kind in MISTAKE_KINDS]


def _proven(kind: MistakeKind, results: Sequence[Result], ids: Sequence[str]) -> ProvenKind:
    counts = Counter(str(each.outcome) for each in results)
    passed, failed = counts["passed"], counts["failed"] + counts["known"]
    verdict = "failed" if failed else "passed" if passed else "untested"
    untested = tuple(_untested(kind, results, ids))
    if verdict == "untested" and not untested:
        untested = ("no check applies to what is declared",)
    return ProvenKind(kind.name, verdict, passed, failed, untested)


def _untested(kind: MistakeKind, results: Sequence[Result], ids: Sequence[str]) -> Iterator[str]:
    if undeclared := [name for name in kind.features if f"refused/feature-{name}" in ids]:
        yield f"not declared: {', '.join(undeclared)}"
    if kind.on_gpu and not any(check.startswith("gpu/") for check in ids):
        yield f"no GPU: {kind.on_gpu}"
    # The causes of declarations that this machine cannot try begin with their names.
    yield from dict.fromkeys(each.cause for each in results if each.outcome == "untested")
    skipped = Counter(SkipKind.read(each.cause)[0] for each in results if each.outcome == "skipped")
    yield from (f"{words}: {_checks(count)}" for words, count in skipped.most_common())
    if rest := sum(map(kind.has, ids)) - len(results):
        yield f"not in this run: {_checks(rest)}"


def _checks(count: int) -> str:
    return f"{count} check{'' if count == 1 else 's'}"
