"""The weights of latent attention: W_UK and W_UV, as tensors or as products that a model computes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from attnplug.core.arguments import Shape
from attnplug.core.checks import check_size
from attnplug.core.errors import SpecError

if TYPE_CHECKING:
    from attnplug.core.impl import LayerTensors
    from attnplug.core.spec import LayerSpec


@runtime_checkable
class LatentProjection(Protocol):
    """The products of a layer with W_UK and W_UV, for N heads, in the layer's dtype.

    A model that quantises the weight gives an object with these methods as `LayerTensors.kv_b_proj`.
    """

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """Queries `[T, N, nope]` times W_UK: `[T, N, kv_lora_rank]`."""
        ...

    def project(self, latent: torch.Tensor) -> torch.Tensor:
        """Attended latents `[T, N, kv_lora_rank]` times W_UV: `[T, N, v_head_dim]`."""
        ...

    def expand(self, kv_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents `[S, kv_lora_rank]` as keys `[S, N, nope]` and values `[S, N, v_head_dim]`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DenseProjection:
    """A LatentProjection of tensors.

    Args:
        w_uk: `[N, nope, kv_lora_rank]`.
        w_uv: `[N, kv_lora_rank, v_head_dim]`.
        joint: both as one weight `[N * (nope + v_head_dim), kv_lora_rank]` that they view; None if they are tensors of
            their own.
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor
    joint: torch.Tensor | None = None

    @classmethod
    def of(cls, kv_b_proj: torch.Tensor, nope: int, v_head_dim: int) -> DenseProjection:
        """The projection of a model's weight; shares its storage."""
        nope, v_head_dim = check_size("nope", nope), check_size("v_head_dim", v_head_dim)
        Shape("_ _: floats", SpecError).check("kv_b_proj", kv_b_proj, {})
        if kv_b_proj.shape[0] % (nope + v_head_dim):
            limit = f"must have a multiple of {nope + v_head_dim} rows, nope + v_head_dim of each head"
            raise SpecError("kv_b_proj", tuple(kv_b_proj.shape), limit)
        heads = kv_b_proj.view(-1, nope + v_head_dim, kv_b_proj.shape[1])
        return cls(heads[:, :nope], heads[:, nope:].transpose(1, 2), kv_b_proj)

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """As LatentProjection.absorb."""
        return _product(q_nope.transpose(0, 1), self.w_uk)

    def project(self, latent: torch.Tensor) -> torch.Tensor:
        """As LatentProjection.project."""
        return _product(latent.transpose(0, 1), self.w_uv)

    def expand(self, kv_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As LatentProjection.expand."""
        (heads, nope, _), size_v = self.w_uk.shape, self.w_uv.shape[2]
        # One product instead of two. On a CPU the two may have to run in float32: see `_product`.
        if self.joint is not None and kv_c.is_cuda:
            both = (kv_c @ self.joint.T).view(kv_c.shape[0], heads, nope + size_v)
            return both[..., :nope], both[..., nope:]
        rows = kv_c[None].expand(heads, -1, -1)
        return _product(rows, self.w_uk.mT), _product(rows, self.w_uv)

    def expand_into(self, kv_c: torch.Tensor, k_nope: torch.Tensor, value: torch.Tensor) -> None:
        """Write what `expand` gives to `k_nope` `[S, N, nope]` and `value` `[S, N, v_head_dim]`, without copies.

        Both may be views of any stride between rows and between heads.
        """
        rows = kv_c[None].expand(self.w_uk.shape[0], -1, -1)
        torch.bmm(rows, self.w_uk.mT, out=k_nope.transpose(0, 1))
        torch.bmm(rows, self.w_uv, out=value.transpose(0, 1))


def _product(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows `[N, tokens, in]` times weights `[N, in, out]`, as `[tokens, N, out]`."""
    if rows.is_cuda or rows.element_size() > 2:
        return torch.bmm(rows, weights).transpose(0, 1)
    # On a CPU, products in half precision can let NaN of one row reach other rows.
    return torch.bmm(rows.float(), weights.float()).transpose(0, 1).to(rows.dtype)


def check_projection(spec: LayerSpec, w_uk: object, w_uv: object, kv_b_proj: object) -> None:
    """SpecError unless the weights that are given are those of `spec`, in one of the two forms."""
    given = {"w_uk": w_uk, "w_uv": w_uv, "kv_b_proj": kv_b_proj}
    given = {name: each for name, each in given.items() if each is not None}
    if not given:
        return
    name = next(iter(given))
    if spec.mla is None:
        raise SpecError(name, "given", "is for layers with mla")
    if len(given) != (1 if "kv_b_proj" in given else 2):
        raise SpecError(
            name, "given", f"comes with {', '.join(given)}", "give w_uk and w_uv, or kv_b_proj alone"
        )
    dims, heads = spec.mla, spec.num_heads
    shapes = {
        "w_uk": (heads, dims.qk_nope_head_dim, dims.kv_lora_rank),
        "w_uv": (heads, dims.kv_lora_rank, dims.v_head_dim),
        "kv_b_proj": (heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank),
    }
    for name, weight in given.items():
        if name == "kv_b_proj" and not isinstance(weight, torch.Tensor):
            if not isinstance(weight, LatentProjection):
                limit = "must be a tensor, or have the methods absorb, project and expand"
                raise SpecError(name, type(weight).__name__, limit)
            continue
        if not isinstance(weight, torch.Tensor) or weight.layout != torch.strided or weight.is_meta:
            raise SpecError(name, type(weight).__name__, f"must be a tensor {shapes[name]} with values")
        found = (str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
        if found != (spec.dtype, shapes[name]):
            remedy = "give the products as a LatentProjection" if found[0] != spec.dtype else None
            raise SpecError(name, " ".join(map(str, found)), f"must be {spec.dtype} {shapes[name]}", remedy)


def projection_of(spec: LayerSpec, tensors: LayerTensors) -> LatentProjection:
    """The projection of a layer's tensors, which have passed `LayerTensors.check`.

    Raises:
        SpecError: the layer has no weights.
    """
    given, dims = tensors.kv_b_proj, spec.mla
    if dims is not None and isinstance(given, torch.Tensor):
        return DenseProjection.of(given, dims.qk_nope_head_dim, dims.v_head_dim)
    if given is not None and not isinstance(given, torch.Tensor):
        return given
    if tensors.w_uk is None or tensors.w_uv is None:
        limit = "is required: the layer has mla"
        raise SpecError("kv_b_proj", None, limit, "give LayerTensors its w_uk and w_uv, or kv_b_proj")
    return DenseProjection(tensors.w_uk, tensors.w_uv)
