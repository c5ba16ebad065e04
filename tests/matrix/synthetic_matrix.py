"""A matrix as real ones are, of backends that are not: every status, limits, and texts meant to break a page."""

from __future__ import annotations

import dataclasses
import functools
import itertools

from attnplug.core.features import Feature
from attnplug.matrix.merging import join
from attnplug.matrix.model import Cell, Finding, Matrix, Run, Status

__all__ = ["HOSTILE", "cell", "finding", "hostile_matrix", "joined_matrix", "run", "synthetic_matrix"]

HOSTILE = "</script><img src=x onerror=alert(1)> | `a` *b* [c](javascript:d) \x1b[31m\u202e &amp; <!--"
"""A name or reason that ends what it stands in, wherever that is."""

LATER = Feature.INVARIANCE | Feature.STATE | Feature.STATE_DRAFTS | Feature.STATE_CHECKPOINTS
"""Features that no run of this matrix knows."""

AXES: dict[str, tuple[object, ...]] = {
    "feature": ("plain", *(str(flag.name).lower() for flag in Feature if flag not in LATER)),
    "phase": ("prefill", "decode", "mixed"),
    "head_size": (128, 64, 16, 32, 80, 96, 112, 192, 256, 576),
    "dtype": ("bfloat16", "float16", "float32"),
    "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "block_size": (16, 32, 64, 128, 256, 8, 1),
    "layout": ("NHD", "HND"),
}
PLAIN = {axis: values[0] for axis, values in AXES.items()}
REFUSED: dict[str, dict[str, tuple[object, ...]]] = {
    "TORCH": {"feature": ("mla", "sparse", "mm_prefix"), "head_size": ()},
    "TRITON": {"feature": ("mla", "sparse", "mm_prefix"), "head_size": (576,), "block_size": (1, 8)},
    "FLASH_ATTN_2": {
        "feature": ("mla", "sparse", "mm_prefix", "sinks", "fp8_kv", "chunked_local", "head_size_v"),
        "head_size": (576,),
        "dtype": ("float32",),
        "kv_cache_dtype": ("fp8", "fp8_e4m3", "fp8_e5m2"),
        "block_size": (1, 8, 16, 32, 64, 128),
        "layout": ("HND",),
    },
    "FLASHINFER": {
        "feature": ("mla", "sparse", "mm_prefix", "head_size_v", "chunked_local"),
        "head_size": (16, 32, 80, 96, 112, 192, 576),
        "dtype": ("float32",),
        "block_size": (1, 8, 128, 256),
    },
}
# Each is served, and the two together are not.
NOT_TOGETHER = {"TRITON": ({"feature": "encoder", "layout": "HND"}, {"feature": "alibi", "head_size": 256})}
VERSIONS = {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0"}


def cell(**values: object) -> Cell:
    """A plain cell with some values set."""
    return Cell(**{**PLAIN, **values})  # type: ignore[arg-type]


def finding(status: Status, *why: str, **values: object) -> Finding:
    """A finding of a plain cell with some values set."""
    return Finding(cell(**values), status, why)


def run(*findings: Finding, backend: str = "TORCH", device: str = "cpu", **fields: object) -> Run:
    """A run of some findings, declared unless `fields` say more."""
    given = {
        "distribution": "attnplug",
        "version": "0.1.0",
        "device_name": None,
        "versions": {},
        "date": "2026-11-21T18:00:00+00:00",
        "commit": None,
    }
    return Run(backend=backend, device=device, findings=findings, **{**given, **fields})  # type: ignore[arg-type]


@functools.cache
def synthetic_matrix(cells: int | None = None) -> Matrix:
    """Four backends: TORCH verified on the CPU, the others on a GPU, with one cell refuted and some not run.

    Args:
        cells: at least how many, made up on further devices where four designs hold less.
    """
    runs = [_run("TORCH", "cpu", "AMD EPYC 9654")]
    runs += [_run(backend, "sm90", "NVIDIA H200") for backend in REFUSED]
    number = 0
    while cells is not None and sum(len(each.findings) for each in runs) < cells:
        number += 1
        again = [
            _run(backend, f"sm{100 + number}", f"Made-up {number}") for backend in list(REFUSED)[number % 2 :]
        ]
        runs += again
    return Matrix(tuple(runs))


def hostile_matrix() -> Matrix:
    """One run in which every text is `HOSTILE`."""
    statuses = (Status.REFUTED, Status.NOT_RUN, Status.REFUSED, Status.VERIFIED)
    findings = [
        Finding(
            Cell(f"{HOSTILE}{number}", HOSTILE, 64, HOSTILE, HOSTILE, 16, HOSTILE), status, (HOSTILE, HOSTILE)
        )
        for number, status in enumerate(statuses)
    ]
    return Matrix(
        (
            run(
                *findings,
                backend=HOSTILE,
                device=HOSTILE,
                distribution=HOSTILE,
                version=HOSTILE,
                device_name=HOSTILE,
                versions={HOSTILE: HOSTILE},
                date=HOSTILE,
                commit=HOSTILE,
            ),
        )
    )


def joined_matrix() -> Matrix:
    """TRITON on an H100, with cells of an H200 and of a compiler beside them, and a plugin on the H200."""
    h100 = [finding(Status.VERIFIED, head_size=size) for size in (64, 128, 256)]
    sinks = finding(Status.VERIFIED, feature="sinks")
    alike = {"device": "sm90", "backend": "TRITON"}
    h200 = {"device_name": "NVIDIA H200", "versions": VERSIONS, "date": "2026-11-28T04:46:00+00:00"}
    runs = (
        run(
            *h100,
            finding(Status.DECLARED, feature="soft_cap"),
            finding(Status.DECLARED, feature="alibi"),
            **alike,
            device_name="NVIDIA H100",
            versions=VERSIONS,
            date="2026-11-25T14:35:00+00:00",
            commit="231deb761fe9",
        ),
        run(sinks, finding(Status.VERIFIED, head_size=64, phase="decode"), **alike, **h200),
        run(
            finding(Status.COMPILED, feature="soft_cap"),
            finding(Status.COMPILED, feature="alibi", dtype="float16"),
            **alike,
            versions={"triton": "3.7.1"},
            date="2026-11-27T08:11:00+00:00",
        ),
        run(sinks, device="sm90", backend="ACME", distribution="attnplug-acme", **h200),
    )
    return join([Matrix((each,)) for each in runs])


def _run(backend: str, device: str, name: str) -> Run:
    return run(
        *(_finding(backend, each) for each in _cells()),
        backend=backend,
        device=device,
        device_name=name,
        versions=VERSIONS,
        commit="47bfcab1d2e3f4a5b6c7d8e9f0a1b2c3d4e5f6a7",
    )


def _cells() -> list[Cell]:
    pairs = itertools.chain.from_iterable(
        itertools.product(
            ((one, value) for value in AXES[one]),
            ((other, value) for value in AXES[other]),
        )
        for one, other in itertools.combinations(AXES, 2)
    )
    made = []
    for pair in pairs:
        asked = cell(**dict(pair))
        if asked.feature in ("direct_kv", "encoder"):
            asked = dataclasses.replace(asked, block_size=None, layout=None)
        made.append(asked)
    return list(dict.fromkeys(made))


def _finding(backend: str, asked: Cell) -> Finding:
    values = dataclasses.asdict(asked)
    why = [
        f"{axis} not supported: {values[axis]} is not one of "
        + ", ".join(str(value) for value in AXES[axis] if value not in refused)
        for axis, refused in REFUSED[backend].items()
        if values[axis] in refused
    ]
    why += [
        f"combination not supported: {' with '.join(map(str, together.values()))}"
        for together in NOT_TOGETHER.get(backend, ())
        if all(values[axis] == value for axis, value in together.items())
    ]
    if why:
        return Finding(asked, Status.REFUSED, tuple(why))
    if backend == "FLASHINFER" and asked.feature == "alibi" and asked.phase == "decode":
        evidence = "output: 37 of 2048 elements are off by more than 0.01, the worst by 0.73 at [3, 1, 17]"
        return Finding(asked, Status.REFUTED, (evidence, "these are the numbers of a layer without ALiBi"))
    if backend == "FLASHINFER" and asked.head_size == 256 and asked.feature != "plain":
        return Finding(asked, Status.NOT_RUN, ("41 compile keys were compiled, --compile-limit 41",))
    if backend == "TRITON" and asked.block_size == 256:
        return Finding(asked, Status.UNCLAIMED)
    return Finding(asked, Status.DECLARED if backend == "FLASH_ATTN_2" else Status.VERIFIED)
