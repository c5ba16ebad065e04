"""The cases of latent attention: dimensions, heads, query lengths, pages, chunks and storage that a backend declares."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec, Phase
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.target import Target, fields_of, latent_pairs

_HEADS = (4, 1, 12, 16, 20, 64, 128)
"""Heads of a rank; 12 and 20 are no powers of 2, and are those of models."""
_LARGER_VALUES = ((24, 56),)
"""Pairs of qk_nope_head_dim and v_head_dim: expanded values larger than expanded keys."""
_K_SCALE = 0.02
"""The scale of 8-bit latents: positions near 1 nearly fill their range, and the other elements are smaller."""
_BETWEEN = 64
"""Elements between two blocks."""

SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "decode": ((1, 1), (1, 17), (1, 64), (1, 150), (1, 3)),
    "idle": ((1, 40), (0, 30), (1, 5), (0, 0), (1, 0)),
    "uniform": ((4, 4), (4, 33), (4, 2), (4, 90), (4, 20)),
    "eight": ((8, 8), (8, 70), (8, 131)),
    "lengths": ((1, 9), (2, 34), (3, 3), (8, 90), (5, 64)),
    "ordered": ((1, 40), (1, 97), (20, 85), (33, 33), (40, 131), (19, 20)),
    "prefill": ((37, 37), (20, 20), (65, 65)),
    "context": ((20, 90), (33, 33), (40, 171), (18, 18), (17, 82)),
    "mixed": ((40, 100), (1, 70), (18, 18), (1, 1), (0, 50), (20, 60)),
}
"""By name, the new tokens and all tokens of each request. In `context`, requests without computed tokens are between
others. `idle` and `uniform` have queries that see no key: those of a request with more new tokens than tokens."""
_OF_PHASE = {Phase.DECODE: ("decode", "idle"), Phase.PREFILL: ("prefill", "context"), None: tuple(SHAPES)}


@dataclasses.dataclass(frozen=True, slots=True)
class LatentCase:
    """One layer of latent attention and one batch.

    Args:
        spec: the layer.
        shape: of SHAPES.
        block_size: tokens of a page.
        chunk_rows: rows of the workspace in which computed tokens are expanded; None for the default.
        joint: whether the weights are given as `kv_b_proj`.
        apart: whether the blocks of the cache are apart, with NaN between them.
    """

    spec: LayerSpec
    shape: str
    block_size: int
    chunk_rows: int | None = None
    joint: bool = False
    apart: bool = False

    @property
    def id(self) -> str:
        """The sizes and all values that are not plain: "latent-decode-h4-d64+16-float32-b16"."""
        spec, dims = self.spec, self.spec.mla
        assert dims is not None  # noqa: S101 - every case has them
        parts = ["latent", self.shape, f"h{spec.num_heads}", f"d{dims.kv_lora_rank}+{dims.qk_rope_head_dim}"]
        parts += [f"p{dims.qk_nope_head_dim}v{dims.v_head_dim}"]
        parts += [spec.dtype, *([spec.kv_cache_dtype] if spec.kv_cache_dtype != "auto" else [])]
        parts += [f"b{self.block_size}", *([f"rows{self.chunk_rows}"] if self.chunk_rows else [])]
        parts += [f"scale{spec.scale:g}"] if spec.scale != spec.replace(scale=None).scale else []
        parts += [str(spec.sparse).replace(" ", "_")] if spec.sparse else []
        flags = {"lse": spec.needs_lse, "joint": self.joint, "apart": self.apart}
        return "-".join([*parts, *(name for name, is_set in flags.items() if is_set)])

    def batch(self, target: Target, *, seed: int = 0) -> Batch:
        """The batch, with NaN in unused rows of its pages and past its tokens."""
        new, tokens = zip(*SHAPES[self.shape], strict=True)
        options: dict[str, Any] = {"block_size": self.block_size, "padding": 3, "seed": seed}
        if self.spec.has_quantized_kv_cache:
            options["k_scale"] = _K_SCALE
        batch = target.batch(self.spec, new, tokens, **options)
        batch = _blocks_apart(batch) if self.apart else batch
        return joint_weights(batch) if self.joint else batch


def _blocks_apart(batch: Batch) -> Batch:
    """The batch with NaN after each block of its cache, as where an engine stores several layers in a block."""
    cache = batch.kv_cache
    assert cache is not None  # noqa: S101 - latents are in pages
    elements = cache[0].numel()
    nan = torch.full((cache.shape[0], elements + _BETWEEN), torch.nan, device=cache.device)
    apart = nan.to(cache.dtype)[:, :elements].view(cache.shape)
    return dataclasses.replace(batch, kv_cache=apart.copy_(cache))


def joint_weights(batch: Batch) -> Batch:
    """The batch with W_UK and W_UV as the model's one weight, `kv_b_proj`."""
    up_key, up_value = batch.tensors.w_uk, batch.tensors.w_uv
    assert up_key is not None  # noqa: S101 - batches of latents have both
    assert up_value is not None  # noqa: S101
    both = torch.cat([up_key, up_value.mT], dim=1).flatten(0, 1)
    tensors = dataclasses.replace(batch.tensors, w_uk=None, w_uv=None, kv_b_proj=both)
    return dataclasses.replace(batch, tensors=tensors)


def latent_cases(target: Target) -> list[LatentCase]:
    """The cases to run, equal in every process: each value alone with plain ones, and pairs of those that interact."""
    few = target.level is Level.SMOKE
    found: dict[str, LatentCase] = {}
    pairs, sizes = latent_pairs(target.backend), target.block_sizes
    block = sizes[0]
    shapes = _OF_PHASE[target.phase]
    both = [shape for shape in ("ordered", "context", "decode") if shape in shapes]
    plain = {
        "pair": pairs[0],
        "num_heads": 4,
        "dtype": target.dtypes[0],
        "shape": both[0],
        "block_size": block,
    }
    chunks: list[int | None] = (
        [None, block, -(-64 // block) * block, 3 * block + 1] if both[0] != "decode" else [None]
    )
    rows: list[dict[str, Any]] = [
        {"shape": shape, "needs_lse": lse} for shape in shapes for lse in (False, True)
    ]
    rows += [{"pair": pair, "shape": shape} for pair in pairs for shape in both]
    rows += [{"pair": pair, "nope": 128, "value": 128} for pair in pairs[: 1 if few else None]]
    # A prefill on kernels of one head size pads the smaller of keys and values.
    rows += [
        {"nope": nope, "value": value, "shape": shape} for nope, value in _LARGER_VALUES for shape in both
    ]
    rows += [{"num_heads": heads, "shape": shape} for heads in _HEADS for shape in both[: 1 if few else 2]]
    rows += [{"dtype": dtype, "shape": shape} for dtype in target.dtypes for shape in both[: 1 if few else 3]]
    rows += [{"kv_cache_dtype": name, "shape": shape} for name in target.kv_cache_dtypes for shape in both]
    rows += [{"block_size": size, "shape": both[-1]} for size in sizes[: 3 if few else 12]]
    rows += [{"chunk_rows": chunk, "shape": shape} for chunk in chunks for shape in both if shape != "decode"]
    rows += [{"scale": 0.15, "needs_lse": True}, {"joint": True}, {"joint": True, "shape": both[-1]}]
    rows += [{"apart": True, "shape": shape} for shape in both]
    # Models are served in half precision, also over latents of 8 bits.
    for stored in ("auto", *target.scaled_kv_dtypes[:1]):
        served: dict[str, Any] = {"dtype": target.dtypes[-1], "kv_cache_dtype": stored}
        rows += [{**served, "shape": shape, "needs_lse": True, "chunk_rows": chunks[-1]} for shape in shapes]
        rows += [{**served, "pair": pair} for pair in pairs]
        rows += [{**served, "num_heads": heads} for heads in _HEADS[-2:]]
    if not few:
        heads = itertools.product(pairs, _HEADS[:5], target.dtypes)
        rows += [{"pair": pair, "num_heads": count, "dtype": dtype} for pair, count, dtype in heads]
        rows += [
            {"kv_cache_dtype": name, "chunk_rows": chunk, "shape": "context", "dtype": dtype}
            for name, chunk, dtype in itertools.product(target.kv_cache_dtypes, chunks, target.dtypes)
            if "context" in shapes
        ]
    rows += _sparse_rows(target, [16] if few else list(_HEADS))
    for row in rows:
        case = _case(plain | row)
        if case is not None and not target.reasons(case.spec):
            found.setdefault(case.id, case)
    return list(found.values())


def _sparse_rows(target: Target, heads: list[int]) -> list[dict[str, Any]]:
    """Rows of sparse layers: the first over every shape, others over short queries, where each query differs too."""
    if Feature.SPARSE not in target.backend.features:
        return []
    samples = [
        value for value in Feature.SPARSE.ask.values if value.kind in target.backend.supported_sparse_kinds
    ]
    if not samples:
        return []
    every = _OF_PHASE[target.phase]
    plain = {
        "sparse": samples[0],
        "shape": next(each for each in ("lengths", "decode", every[0]) if each in every),
    }
    rows: list[dict[str, Any]] = [plain | {"shape": shape, "needs_lse": True} for shape in every]
    rows += [plain | {"sparse": value} for value in samples[1:]]
    rows += [plain | {"pair": pair} for pair in latent_pairs(target.backend)]
    rows += [plain | {"num_heads": count} for count in heads]
    rows += [plain | {"dtype": dtype} for dtype in target.dtypes]
    rows += [plain | {"kv_cache_dtype": name} for name in target.kv_cache_dtypes]
    rows += [plain | {"block_size": size} for size in target.block_sizes[:3]]
    apart = plain | {"apart": True}
    return [*rows, apart, *(apart | {"kv_cache_dtype": name} for name in target.scaled_kv_dtypes[:1])]


def _case(row: dict[str, Any]) -> LatentCase | None:
    """The case of a row; None if no layer has its values."""
    own = {
        name: row[name]
        for name in ("num_heads", "dtype", "needs_lse", "kv_cache_dtype", "scale", "sparse")
        if name in row
    }
    try:
        spec = LayerSpec(**own, **fields_of(row["pair"], row.get("nope", 32), row.get("value", 24)))
    except SpecError:
        return None
    return LatentCase(
        spec,
        row["shape"],
        row["block_size"],
        row.get("chunk_rows"),
        row.get("joint", False),
        row.get("apart", False),
    )
