"""The weights of latent attention: one projection of W_UK and W_UV, whichever way a model gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug.core import DenseProjection, LayerSpec, LayerTensors, MLADims
from attnplug.core.mla.weights import LatentProjection, projection_of
from attnplug.errors import SpecError

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=6, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4)
SPEC = LayerSpec(num_heads=2, num_kv_heads=1, head_size=8, mla=DIMS, dtype="float32")
PLAIN = LayerSpec(num_heads=2, num_kv_heads=1, head_size=8, dtype="float32")
JOINT = torch.arange(2 * 7 * 6, dtype=torch.float32).view(14, 6) / 50
W_UK = torch.stack([JOINT[:3], JOINT[7:10]])
W_UV = torch.stack([JOINT[3:7].T, JOINT[10:].T])


class Products:
    """A weight that only its model can multiply."""

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        return q_nope

    def project(self, latent: torch.Tensor) -> torch.Tensor:
        return latent

    def expand(self, kv_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_c, kv_c


def refusal(spec: LayerSpec, **weights: Any) -> str:
    with pytest.raises(SpecError) as caught:
        LayerTensors(**weights).check(spec)
    return str(caught.value)


@pytest.mark.parametrize("made", [DenseProjection.of(JOINT, 3, 4), DenseProjection(W_UK, W_UV)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_products_are_those_of_the_two_weights(made: DenseProjection, dtype: torch.dtype) -> None:
    made = DenseProjection(made.w_uk.to(dtype), made.w_uv.to(dtype))
    torch.manual_seed(0)
    query, latent, rows = (torch.randn(*shape).to(dtype) for shape in ((5, 2, 3), (5, 2, 6), (4, 6)))
    close = {"rtol": 0, "atol": 2e-2 if dtype == torch.bfloat16 else 1e-5}
    w_uk, w_uv = made.w_uk.float(), made.w_uv.float()
    torch.testing.assert_close(
        made.absorb(query).float(), torch.einsum("tnd,ndl->tnl", query.float(), w_uk), **close
    )
    torch.testing.assert_close(
        made.project(latent).float(), torch.einsum("tnl,nlv->tnv", latent.float(), w_uv), **close
    )
    keys, values = made.expand(rows)
    torch.testing.assert_close(keys.float(), torch.einsum("sl,ndl->snd", rows.float(), w_uk), **close)
    torch.testing.assert_close(values.float(), torch.einsum("sl,nlv->snv", rows.float(), w_uv), **close)
    assert (keys.dtype, values.dtype) == (dtype, dtype)


def test_products_may_be_written_into_views_of_wider_rows() -> None:
    made, rows = DenseProjection.of(JOINT, 3, 4), torch.randn(4, 6)
    keys, values = torch.full((4, 2, 5), -1.0), torch.full((4, 2, 9), -1.0)
    made.expand_into(rows, keys[..., :3], values[..., 5:])
    expected = made.expand(rows)
    torch.testing.assert_close((keys[..., :3], values[..., 5:]), expected)
    assert (keys[..., 3:] == -1).all()
    assert (values[..., :5] == -1).all()


def test_a_joint_weight_is_shared_and_not_copied() -> None:
    made = DenseProjection.of(JOINT, 3, 4)
    assert made.joint is JOINT
    assert made.w_uk.data_ptr() == JOINT.data_ptr()
    assert torch.equal(made.w_uk, W_UK)
    assert torch.equal(made.w_uv, W_UV)


def test_nan_of_one_row_stays_in_it() -> None:
    made = DenseProjection(W_UK.bfloat16(), W_UV.bfloat16())
    rows = torch.ones(3, 6, dtype=torch.bfloat16)
    rows[1] = torch.nan
    keys, values = made.expand(rows)
    for each in (keys, values):
        assert each.isnan().any(dim=(1, 2)).tolist() == [False, True, False]


@pytest.mark.parametrize("nope", [2, 4])
def test_a_joint_weight_has_whole_heads(nope: int) -> None:
    with pytest.raises(SpecError) as caught:
        DenseProjection.of(JOINT, nope, 4)
    assert str(caught.value) == (
        f"kv_b_proj=(14, 6) must have a multiple of {nope + 4} rows, nope + v_head_dim of each head"
    )
    with pytest.raises(SpecError, match=r"kv_b_proj\.dtype=torch\.int64 must be torch\.bfloat16, "):
        DenseProjection.of(JOINT.long(), 3, 4)


@pytest.mark.parametrize(
    "weights", [{"w_uk": W_UK, "w_uv": W_UV}, {"kv_b_proj": JOINT}, {"kv_b_proj": Products()}, {}]
)
def test_each_form_is_one_projection(weights: dict[str, Any]) -> None:
    tensors = LayerTensors(**weights)
    tensors.check(SPEC)
    assert tensors.has_projection is bool(weights)
    if not weights:
        with pytest.raises(SpecError) as caught:
            projection_of(SPEC, tensors)
        assert str(caught.value) == (
            "kv_b_proj=None is required: the layer has mla; give LayerTensors its w_uk and w_uv, or kv_b_proj"
        )
        return
    made = projection_of(SPEC, tensors)
    assert isinstance(made, LatentProjection)
    if isinstance(made, DenseProjection):
        assert torch.equal(made.w_uk, W_UK)
        assert torch.equal(made.w_uv, W_UV)
    else:
        assert made is weights["kv_b_proj"]


@pytest.mark.parametrize(
    ("spec", "weights", "text"),
    [
        (PLAIN, {"w_uk": W_UK}, "w_uk='given' is for layers with mla"),
        (
            SPEC,
            {"w_uk": W_UK},
            "w_uk='given' comes with w_uk; give w_uk and w_uv, or kv_b_proj alone",
        ),
        (
            SPEC,
            {"w_uv": W_UV, "kv_b_proj": JOINT},
            "w_uv='given' comes with w_uv, kv_b_proj; give w_uk and w_uv, or kv_b_proj alone",
        ),
        (
            SPEC,
            {"kv_b_proj": [1.0]},
            "kv_b_proj='list' must be a tensor, or have the methods absorb, project and expand",
        ),
        (SPEC, {"w_uk": W_UK, "w_uv": [1.0]}, "w_uv='list' must be a tensor (2, 6, 4) with values"),
        (SPEC, {"kv_b_proj": JOINT.to("meta")}, "kv_b_proj='Tensor' must be a tensor (14, 6) with values"),
        (SPEC, {"kv_b_proj": JOINT.to_sparse()}, "kv_b_proj='Tensor' must be a tensor (14, 6) with values"),
        (SPEC, {"kv_b_proj": JOINT[1:]}, "kv_b_proj='float32 (13, 6)' must be float32 (14, 6)"),
        (
            SPEC,
            {"kv_b_proj": JOINT.half()},
            "kv_b_proj='float16 (14, 6)' must be float32 (14, 6); give the products as a LatentProjection",
        ),
        (
            SPEC,
            {"w_uk": W_UK.mT, "w_uv": W_UV},
            "w_uk='float32 (2, 6, 3)' must be float32 (2, 3, 6)",
        ),
    ],
)
def test_weights_of_another_layer_are_refused(spec: LayerSpec, weights: dict[str, Any], text: str) -> None:
    assert refusal(spec, **weights) == text
