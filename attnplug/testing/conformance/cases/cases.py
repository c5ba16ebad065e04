"""A case of the kit: one layer and one batch, and the search for cases that a backend serves.

The plainest layer in all kinds of batches, and the same layer with one other value at a time.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec, Phase
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.case_axes import KINDS, axes, far_blocks, lengths, samples_of
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.target import Target, layer_fields, of_phase
from attnplug.testing.design.search import HEAD_SIZES, Row, Search, compile_key
from attnplug.testing.drawn_values import FP8_SCALES, Numbers
from attnplug.testing.views import shard

_OF_BATCH = {"shape", "layout", "numbers", "chunk_rows", "joint", "apart"}
"""Axes of batches alone: layers differ in all others."""
_OF_LAYERS = (Numbers.FAR, Numbers.NEGATIVE, Numbers.WIDE, Numbers.RANGE)
"""Numbers that some layers do not hold."""
_SHIFTED = (Numbers.FAR, Numbers.NEGATIVE)
_NO_FIELDS = _OF_BATCH | {"kind", "heads", "values"}
"""Axes whose name is not that of a field of a layer."""


# The scale of 8-bit latents: positions near 1 nearly fill their range, and the other elements are smaller.
_LATENT_SCALE = 0.02
_BETWEEN = 64
"""Elements between two blocks that are apart."""
_MOST_SCORES = 2**20
"""Scores of a head and a request that the oracle computes in full."""
_STRATUM = 64
"""Rows of which at least one is compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One layer and one batch.

    Args:
        spec: the layer.
        shape: the kind of the batch, of SHAPES, LONG or LATENT.
        block_size: tokens of a page.
        layout: of the cache.
        narrowed: whether the batch is causal though the layer is not.
        numbers: the sizes of the numbers.
        chunk_rows: rows of the workspace in which computed latents are expanded; None for the default.
        joint: whether the weights of latents are given as `kv_b_proj`.
        apart: whether the blocks of the cache are apart, with NaN between them.
    """

    spec: LayerSpec
    shape: str
    block_size: int
    layout: str
    narrowed: bool = False
    numbers: Numbers = Numbers.PLAIN
    chunk_rows: int | None = None
    joint: bool = False
    apart: bool = False

    @property
    def id(self) -> str:
        """The sizes and all values that are not plain: "decode-h4x2-d64-float32-b16-NHD-window7.0"."""
        spec = self.spec
        parts = [self.shape, f"h{spec.num_heads}x{spec.num_kv_heads}", f"d{spec.head_size}"]
        parts += [f"v{spec.head_size_v}"] if spec.head_size_v != spec.head_size else []
        if (dims := spec.mla) and (dims.qk_nope_head_dim, dims.v_head_dim) != (32, 24):
            parts.append(f"p{dims.qk_nope_head_dim}v{dims.v_head_dim}")
        parts += [spec.dtype, *([spec.kv_cache_dtype] if spec.kv_cache_dtype != "auto" else [])]
        parts += [] if spec.direct_kv else [f"b{self.block_size}", self.layout]
        parts += [self.kind] if self.kind != "decoder" else []
        parts += [f"scale{spec.scale:g}"] if spec.scale != spec.replace(scale=None).scale else []
        if spec.is_windowed:
            parts.append("window{}.{}".format(*spec.window))
        parts += [f"chunk{spec.chunk_size}"] if spec.chunk_size else []
        parts += [f"cap{spec.logits_soft_cap:g}"] if spec.logits_soft_cap else []
        parts += [str(spec.sparse).replace(" ", "_")] if spec.sparse else []
        parts += [f"invariance_{'_'.join(spec.invariance)}"] if spec.invariance else []
        parts += [f"rows{self.chunk_rows}"] if self.chunk_rows else []
        flags = {"sinks": spec.has_sinks, "alibi": spec.has_alibi, "lse": spec.needs_lse}
        flags |= {
            "headscales": spec.head_scales,
            "spans": spec.mm_prefix,
            "joint": self.joint,
            "apart": self.apart,
        }
        parts += [name for name, is_set in flags.items() if is_set]
        return "-".join(parts if self.numbers is Numbers.PLAIN else [*parts, self.numbers])

    @property
    def kind(self) -> str:
        """The name in KINDS."""
        if self.narrowed:
            return "narrowed"
        return next(
            name
            for name, fields in reversed(KINDS.items())
            if name != "narrowed" and all(getattr(self.spec, field) == each for field, each in fields.items())
        )

    def batch(self, target: Target, *, seed: int = 0) -> Batch:
        """The batch, with its traps, on the target's device."""
        spec = self.spec
        new, tokens = of_phase(target.phase, *lengths(self.shape, spec, self.block_size))
        # Padding rows hold NaN, which no answer may contain.
        options: dict[str, Any] = {"padding": 3, "seed": seed, "causal": True if self.narrowed else None}
        options["numbers"] = self.numbers
        if not spec.direct_kv:
            options |= {"block_size": self.block_size, "layout": self.layout, "drop_window": True}
            scales = {"k_scale": _LATENT_SCALE} if spec.mla else FP8_SCALES
            options |= scales if spec.has_kv_scales else {}
            options |= {"skip_blocks": far_blocks(self.block_size)} if self.shape == "far-blocks" else {}
        elif new != tokens:
            # An engine's own cache drops the keys that a causal window or a chunk has passed.
            reach = spec.chunk_size or max(tokens, default=0)
            if spec.causal and spec.window[0] >= 0:
                reach = spec.window[0]
            options["key_lens"] = [
                min(count + reach, every) for count, every in zip(new, tokens, strict=True)
            ]
        batch = target.batch(spec, new, tokens, **options)
        if batch.made_of is not None:
            batch.made_of = dataclasses.replace(batch.made_of, config=self.config)
        batch.sampled = sampled_rows(spec, new, new if spec.is_encoder else tokens)
        batch = _with_blocks_apart(batch) if self.apart else batch
        return joint_weights(batch) if self.joint else batch

    @property
    def config(self) -> dict[str, Any]:
        """The fields of BuilderConfig that it needs."""
        return {} if self.chunk_rows is None else {"context_chunk_rows": self.chunk_rows}


def sampled_rows(spec: LayerSpec, new: Sequence[int], tokens: Sequence[int]) -> torch.Tensor | None:
    """The rows to compare of a step with more scores than _MOST_SCORES in a request; None is all.

    They are the first and the last ones, those beside the ends of the layer's limits and of powers of 2, and one of
    each _STRATUM.
    """
    if all(count * held <= _MOST_SCORES for count, held in zip(new, tokens, strict=True)):
        return None
    generator, rows, start = torch.Generator().manual_seed(0), list[int](), 0
    ends = [2**power for power in range(4, 17)] + [side + 1 for side in spec.window if side >= 0]
    ends += [spec.chunk_size] if spec.chunk_size else []
    for count, held in zip(new, tokens, strict=True):
        own = set(range(count))
        if count * held > _MOST_SCORES:
            # The ends are positions, and kernels count rows too.
            marks = [0, count, *ends, *(end - held + count for end in ends)]
            drawn = torch.arange(0, count, _STRATUM)
            drawn += torch.randint(_STRATUM, drawn.shape, generator=generator)
            own &= {*drawn.tolist(), *(mark + step for mark in marks for step in (-1, 0, 1))}
        rows += sorted(start + row for row in own)
        start += count
    return torch.tensor(rows)


def _with_blocks_apart(batch: Batch) -> Batch:
    """The batch with NaN after each block of its cache."""
    # Engines that store several layers in a block have such caches.
    cache = batch.kv_cache
    assert cache is not None  # noqa: S101 - latents are in pages
    elements = cache[0].numel()
    nan = torch.full((cache.shape[0], elements + _BETWEEN), torch.nan, device=cache.device)
    apart = nan.to(cache.dtype).as_strided(cache.shape, (elements + _BETWEEN, *cache.stride()[1:]))
    return dataclasses.replace(batch, kv_cache=apart.copy_(cache))


def joint_weights(batch: Batch) -> Batch:
    """The batch with W_UK and W_UV as the model's one weight, `kv_b_proj`."""
    up_key, up_value = batch.tensors.w_uk, batch.tensors.w_uv
    assert up_key is not None  # noqa: S101 - batches of latents have both
    assert up_value is not None  # noqa: S101
    both = torch.cat([up_key, up_value.mT], dim=1).flatten(0, 1)
    tensors = dataclasses.replace(batch.tensors, w_uk=None, w_uv=None, kv_b_proj=shard(both))
    return dataclasses.replace(batch, tensors=tensors)


class CaseSearch(Search):
    """Asks one target about cases."""

    def __init__(self, target: Target) -> None:
        self._target, self._phase = target, target.phase
        self._head_sizes = tuple(dict.fromkeys((*target.head_sizes, *HEAD_SIZES)))
        choices = axes(target)
        self._fields = tuple(name for name in choices if name not in _NO_FIELDS)
        self._asked = tuple(name for name in choices if name not in _OF_BATCH)
        self._scaled = next(iter(samples_of(target, Feature.FP8_KV)))
        self._of_rows: dict[tuple[Any, ...], Sequence[Any]] = {}
        self._of_layers: dict[LayerSpec, Sequence[Any]] = {}
        self.order = tuple(choices)
        super().__init__(choices)

    def complete(self, fixed: Mapping[str, Any]) -> Row | None:
        """The base with the fixed values; a kind whose K and V come with the call has no page sizes and layouts."""
        row: Row = {**self.base, **fixed}
        if row.get("head_scales") and "kv_cache_dtype" not in fixed:
            row["kv_cache_dtype"] = self._scaled
        if not KINDS[row["kind"]].get("direct_kv"):
            return row
        pages = dict.fromkeys(("block_size", "layout"))
        return None if any(fixed.get(axis) for axis in pages) else {**row, **pages}

    def ask(self, row: Row) -> Sequence[Any]:
        """The backend's reasons against the layer, or the error if no layer has the values."""
        # Rows that differ in their batch alone have one layer.
        key = (*[row[name] for name in self._asked], row["numbers"] in _OF_LAYERS and row["numbers"])
        if key not in self._of_rows:
            try:
                self._of_rows[key] = self._reasons(self._layer(row))
            except SpecError as problem:
                # Values that exclude each other are a refusal too, so the search goes on to other values.
                self._of_rows[key] = (problem,)
        return self._of_rows[key]

    def _reasons(self, spec: LayerSpec) -> Sequence[Any]:
        found = self._of_layers.get(spec)
        if found is None:
            target = self._target
            found = target.backend.validate_configuration(spec, target.device, self._phase)
            self._of_layers[spec] = found
        return found

    def case(self, row: Row) -> Case:
        """The case of a served row."""
        target = self._target
        block_size = row["block_size"] or target.block_sizes[0]
        layout = row["layout"] or target.backend.supported_kv_cache_layouts()[0]
        pages, more = row.get("chunk_rows") or (0, 0)
        return Case(
            self._layer(row),
            row["shape"],
            block_size,
            layout,
            narrowed=row["kind"] == "narrowed",
            numbers=Numbers(row["numbers"]),
            chunk_rows=pages * block_size + more or None,
            joint=row.get("joint", False),
            apart=row.get("apart", False),
        )

    def _layer(self, row: Row) -> LayerSpec:
        """The layer of a row; SpecError if its values exclude each other."""
        fields = {name: row[name] for name in self._fields if row[name] is not None} | KINDS[row["kind"]]
        heads = dict(zip(("num_heads", "num_kv_heads"), row["heads"], strict=True))
        fields = layer_fields(fields | heads)
        if row["values"] is not None:
            fields["head_size_v"] = self._value_size(row["values"], fields["head_size"], fields)
        spec = LayerSpec(**fields)
        if row["window"] is not None and not spec.is_windowed:
            raise SpecError("window", row["window"], "limits nothing in a causal layer")
        if spec.mla and not spec.mla.qk_rope_head_dim and row["numbers"] in _SHIFTED:
            raise SpecError("numbers", row["numbers"], "are of an element that W_UK leaves as it is")
        if row["numbers"] == Numbers.WIDE and (
            spec.mla or not {spec.dtype, spec.resolved_kv_cache_dtype} <= {"bfloat16", "float32"}
        ):
            raise SpecError(
                "numbers", Numbers.WIDE, f"are not held by {spec.dtype} and {spec.kv_cache_dtype}"
            )
        if row["numbers"] == Numbers.RANGE and (spec.mla or not spec.has_kv_scales):
            raise SpecError("numbers", Numbers.RANGE, "are those of stored types with scales")
        if row["mm_prefix"] and row["kind"] == "cross":
            raise SpecError("mm_prefix", True, "is for layers whose keys are their own tokens")
        if row["kind"] in ("encoder", "encoder_half") and self._target.phase is Phase.DECODE:
            raise SpecError("kind", row["kind"], "has no tokens to decode")
        return spec

    def _value_size(self, which: str | int, size: int, fields: Mapping[str, Any]) -> int:
        """A head size of values "smaller" or "larger" than `size`, if there is one that the backend accepts, or a number."""
        if isinstance(which, int):
            return which
        order = operator.lt if which == "smaller" else operator.gt
        candidates = [each for each in self._head_sizes if order(each, size)]
        if not candidates:
            raise SpecError("values", which, f"needs a head size other than {size}")
        # Kernels may serve one pair of sizes only, such as 192 and 128.
        served = (
            each for each in candidates if not self._reasons(LayerSpec(**{**fields, "head_size_v": each}))
        )
        return next(served, candidates[0])


_MOST_COMPILE_KEYS = {Level.SMOKE: 3, Level.FULL: 12}


def single_cases(target: Target, shapes: Sequence[str] = ("mixed", "decode")) -> list[Case]:
    """The plainest case of each shape, then those that differ from it in one value, in each of `shapes`.

    If the backend has compile keys, only the cases of the first few keys are kept.
    """
    search = CaseSearch(target)
    known = search.axes["shape"]
    wanted = [shape for shape in shapes if shape in known] or known[:1]
    rows = [{"shape": shape} for shape in known]
    for axis, values in search.axes.items():
        if axis != "shape":
            rows += [{"shape": shape, axis: value} for value in values[1:] for shape in wanted]
    cases: dict[str, Case] = {}
    keys: set[Hashable] = set()
    for fixed in rows:
        row = search.complete(fixed)
        if row is None or search.reasons(row):
            continue
        case = search.case(row)
        key = compile_key(target.backend, case.spec)
        if key is None or key in keys or len(keys) < _MOST_COMPILE_KEYS[target.level]:
            keys.add(key)
            cases.setdefault(case.id, case)
    return list(cases.values())
