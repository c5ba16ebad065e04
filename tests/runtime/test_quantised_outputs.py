"""Outputs of 8 bits: the runtime gives scales to impls that declare the quantisation, and refuses all others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fake_backends import backend, offered
from model_layers import layer
from served_model import Drawn, ServedModel

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import LayerSpec
from attnplug.core.dtypes import output_quant_key
from attnplug.core.errors import BatchError

FULL = layer(dtype="float32")
FP8 = torch.float8_e4m3fn
SCALE = torch.tensor([0.02])


class Plain(TorchImpl):
    """Quantises nothing."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


class Recording(TorchImpl):
    """Declares two quantisations, and keeps what it is called with."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return quant_key in ("fp8_e4m3", "nvfp4")

    def attend(self, *given: Any, **named: Any) -> torch.Tensor:
        self.output, self.named = given[6], named
        return given[6]


class Ordered(TorchMetadataBuilder):
    reorder_batch_threshold = 1


def begun(spec: LayerSpec = FULL, **asked: Any) -> tuple[ServedModel, Drawn]:
    """A model of one layer in a step of a decode and a prompt, and the call of the layer."""
    model = ServedModel({"layer": spec}, **asked)
    model.add("a")
    model.step(a=20)
    model.add("b")
    model.begin(a=1, b=7)
    return model, model.draw("layer", {"a": 1, "b": 7})


def call(model: ServedModel, drawn: Drawn, output: torch.Tensor | None, **scales: Any) -> torch.Tensor:
    return model.runtime.forward("layer", drawn.query, drawn.key, drawn.value, output, **scales)


def quantised(expected: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (expected.float() / scale).clamp(-limit, limit).to(dtype).float() * scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("written", [FP8, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [0.02, 1e-3], ids=["fits", "clamped"])
def test_torch_quantises_what_it_attended(dtype: str, written: torch.dtype, scale: float) -> None:
    model, drawn = begun(layer(dtype=dtype))
    factor = torch.tensor(scale)
    output = torch.empty(8, 4, 8, dtype=written)
    assert call(model, drawn, output, output_scale=factor) is output
    # One step of the type: a small error may round to the next value.
    expected = quantised(drawn.expected, written, factor)
    step = 2.0**-2 if written is torch.float8_e5m2 else 2.0**-3
    torch.testing.assert_close(
        output.float() * factor, expected, rtol=step, atol=2e-2 if dtype != "float32" else scale
    )


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf])
def test_a_scale_that_outputs_cannot_be_divided_by_is_refused_by_name(value: float) -> None:
    model, drawn = begun()
    with pytest.raises(BatchError, match=r"^output_scale=.* must be finite and above 0"):
        call(model, drawn, torch.empty(8, 4, 8, dtype=FP8), output_scale=torch.tensor(value))


def test_the_plain_output_rounds_to_the_quantised_one() -> None:
    model, drawn = begun()
    plain = call(model, drawn, None)
    output = call(model, drawn, torch.empty(8, 4, 8, dtype=FP8), output_scale=SCALE)
    assert torch.equal(output.float() * SCALE, quantised(plain, FP8, SCALE))


def test_an_lse_comes_with_a_quantised_output() -> None:
    model, drawn = begun(layer(dtype="float32", needs_lse=True))
    lse, quantised_lse = torch.empty(2, 8, 4)
    call(model, drawn, None, output_lse=lse)
    call(model, drawn, torch.empty(8, 4, 8, dtype=FP8), output_lse=quantised_lse, output_scale=SCALE)
    assert torch.equal(lse, quantised_lse)


def test_both_halves_of_a_composite_quantise() -> None:
    decoder = backend("D", supported_phases=("decode",), get_builder_cls=lambda: Ordered)
    with offered(decoder, backend("P", supported_phases=("prefill",))):
        model, drawn = begun(per_phase=True)
    assert model.plan.backends == ("P+D",)
    plain = call(model, drawn, None)
    output = call(model, drawn, torch.empty(8, 4, 8, dtype=FP8), output_scale=SCALE)
    assert torch.equal(output.float() * SCALE, quantised(plain, FP8, SCALE))


def test_a_composite_of_which_one_half_cannot_refuses() -> None:
    decoder = backend("D", supported_phases=("decode",), get_builder_cls=lambda: Ordered)
    prefiller = backend("P", supported_phases=("prefill",), get_impl_cls=lambda: Plain)
    with offered(decoder, prefiller):
        model, drawn = begun(per_phase=True)
    with pytest.raises(
        BatchError, match=r"output_scale=.*of layer layer must be None: P\+D quantises no outputs"
    ):
        call(model, drawn, torch.empty(8, 4, 8, dtype=FP8), output_scale=SCALE)
    assert call(model, drawn, None).shape == (8, 4, 8)


def recording() -> tuple[ServedModel, Drawn]:
    with offered(backend("RECORDING", get_impl_cls=lambda: Recording)):
        model = ServedModel({"layer": FULL}, debug=False)
    model.add("a")
    model.begin(a=8)
    return model, model.draw("layer", {"a": 8})


@pytest.mark.parametrize(
    ("shape", "dtype", "names"),
    [
        ((8, 4, 8), FP8, ["output_scale"]),
        ((8, 4, 4), torch.uint8, ["output_scale", "output_block_scale"]),
        ((8, 4, 4), torch.uint8, ["output_block_scale"]),
    ],
    ids=["fp8", "nvfp4", "nvfp4-blocks-only"],
)
def test_declared_quantisations_reach_the_impl(shape: Any, dtype: torch.dtype, names: list[str]) -> None:
    model, drawn = recording()
    all_scales = {"output_scale": SCALE, "output_block_scale": torch.empty(8, 2, dtype=FP8)}
    scales, output = {name: all_scales[name] for name in names}, torch.empty(shape, dtype=dtype)
    call(model, drawn, output, **scales)
    impl: Any = model.runtime.layers["layer"].impl
    assert impl.output is output
    assert {name: impl.named.get(name) for name in all_scales} == {
        name: scales.get(name) for name in all_scales
    }


def test_a_call_without_scales_gives_the_impl_none() -> None:
    model, drawn = recording()
    call(model, drawn, None)
    impl: Any = model.runtime.layers["layer"].impl
    assert impl.named["output_scale"] is impl.named["output_block_scale"] is None


BLOCKS = torch.empty(8, 2, dtype=FP8)


@pytest.mark.parametrize(
    ("output", "scales", "problem"),
    [
        (None, {"output_scale": SCALE}, "output=None of layer layer is required with output_scale"),
        (torch.empty(8, 4, 8), {"output_scale": SCALE}, "must be None: RECORDING quantises no outputs to torch.float32"),
        (torch.empty(8, 4, 8).half(), {"output_scale": SCALE}, "quantises no outputs to torch.float16"),
        (torch.empty(8, 4, 8).to(torch.float8_e5m2), {"output_scale": SCALE}, "no outputs to torch.float8_e5m2"),
        (torch.empty(8, 4, 8).to(FP8), {}, "output.dtype=torch.float8_e4m3fn of layer layer must be torch.float32"),
        (torch.empty(8, 4, 8).to(FP8), {"output_block_scale": BLOCKS}, "output_block_scale=.* quantises no outputs"),
        (torch.empty(8, 4, 8).to(FP8), {"output_scale": torch.ones(2)}, r"\(2,\)' of layer layer must be one torch.fl"),
        (torch.empty(8, 4, 8).to(FP8), {"output_scale": SCALE.half()}, "must be one torch.float32"),
        (torch.empty(7, 4, 8).to(FP8), {"output_scale": SCALE}, r"output=\(7, 4, 8\) of layer layer must have"),
        (torch.empty(8, 4, 8, dtype=torch.uint8), {"output_block_scale": BLOCKS}, r"the shape \(at least 8, 4, 4\)"),
        (torch.empty(8, 4, 4, dtype=torch.uint8), {"output_block_scale": BLOCKS[:7]}, "at least 8 rows"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_output_and_impl_are_refused(output: Any, scales: Any, problem: str) -> None:
    model, drawn = recording()
    with pytest.raises(BatchError, match=problem):
        call(model, drawn, output, **scales)


def test_an_impl_that_declares_nothing_gets_no_scale() -> None:
    with offered(backend("PLAIN", get_impl_cls=lambda: Plain)):
        model, drawn = begun()
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(
            BatchError, match=rf"{name}='given' of layer layer must be None: PLAIN quantises no"
        ):
            call(model, drawn, torch.empty(8, 4, 8, dtype=FP8), **{name: SCALE})


def test_names_of_quantisations() -> None:
    assert output_quant_key(torch.bfloat16) is None
    assert output_quant_key(FP8) == "fp8_e4m3"
    assert output_quant_key(FP8, has_block_scale=True) == "fp8_e4m3_block"
    assert output_quant_key(torch.int8) == "int8"
    assert output_quant_key(torch.uint8, has_block_scale=True) == "nvfp4"
