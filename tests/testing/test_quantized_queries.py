"""A backend that rounds queries to 8 bits over pages of 8 bits declares it, and gets wider bounds for those layers alone."""

from __future__ import annotations

import torch
from catching import variant
from plain_attention import KernelImpl

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device, LayerSpec, composite_backend
from attnplug.testing import tolerance
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.mistakes.expectations import difference
from attnplug.testing.conformance.target import Target

SPEC = LayerSpec(
    num_heads=4, num_kv_heads=2, head_size=64, dtype="bfloat16", kv_cache_dtype="fp8_e4m3", needs_lse=True
)


class InEightBits(KernelImpl):
    """Queries and weights in e4m3, as kernels with products of 8 bits have them."""

    too_large = 1.0

    def one(self, query, keys, values, scales, sinks, span):
        most = query.abs().amax(2, keepdim=True).clamp_min(1e-6) / 448
        rounded = (query / most).to(torch.float8_e4m3fn).float() * most
        return super().one(rounded, keys, values, (scales[0], scales[1] * self.too_large), sinks, span)

    def weigh(self, logits, values, sinks, span):
        _, lse = super().weigh(logits, values, sinks, span)
        weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
        return (weights * 448).to(torch.float8_e4m3fn).float() / 448 @ values, lse


def problem(impl: type[KernelImpl], declared: bool, spec: LayerSpec = SPEC) -> str | None:
    backend = variant("EIGHT_BITS", impl=impl, quantizes_queries=declared)
    target = Target(backend, Device("cpu"))
    batch = target.batch(spec, [1, 5, 40], [300, 29, 40], k_scale=0.37, v_scale=1.9)
    return difference(batch, Harness.of(target, batch).forward(batch))


def test_rounded_queries_are_right_where_they_are_declared() -> None:
    assert problem(InEightBits, declared=True) is None
    assert problem(InEightBits, declared=False) is not None


def test_a_declaration_says_nothing_about_layers_whose_pages_have_16_bits() -> None:
    assert problem(InEightBits, declared=True, spec=SPEC.replace(kv_cache_dtype="auto")) is not None
    plain = SPEC.replace(kv_cache_dtype="auto")
    assert tolerance(plain, quantized_queries=True) == tolerance(plain)


def test_a_wrong_scale_is_found_within_the_wider_bounds() -> None:
    wrong = type("TooLarge", (InEightBits,), {"too_large": 1.25})
    assert problem(wrong, declared=True) is not None


def test_a_composite_rounds_queries_if_one_half_does() -> None:
    rounding = variant("ROUNDING", quantizes_queries=True)
    assert composite_backend(rounding, TorchBackend).quantizes_queries
    assert not composite_backend(variant("EXACT"), TorchBackend).quantizes_queries
