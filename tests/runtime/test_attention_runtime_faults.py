"""Backends that fail: the step can be run again, and debug mode says which one it was."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from fake_backends import backend, offered, with_impl
from model_layers import layer
from served_model import ServedModel

from attnplug import Feature, LayerSpec, plan
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core.errors import BackendFaultError, BatchError, PolicyError
from attnplug.core.impl import LayerTensors
from attnplug.core.mla.dims import MLADims
from attnplug.runtime import AttentionRuntime
from attnplug.testing import direct_batch

FULL = layer(dtype="float32")
SLIDING = layer(dtype="float32", sliding_window=20)


class Faulty(TorchImpl):
    """Raises once where `fails` names it: before it writes, between, or after it attended."""

    fails: ClassVar[dict[str, str]] = {}

    def update_kv_cache(self, *given: Any) -> None:
        self._perhaps("before")
        super().update_kv_cache(*given)

    def attend(self, *given: Any, **named: Any) -> Any:
        self._perhaps("between")
        output = super().attend(*given, **named)
        self._perhaps("after")
        return output

    def _perhaps(self, when: str) -> None:
        if self.fails.get(self.layer_name) == when:
            del self.fails[self.layer_name]
            raise RuntimeError(f"kernel of layer {self.layer_name} failed")


def twins(specs: Any) -> tuple[ServedModel, ServedModel]:
    """Two equal models: one on FAULTY, one on TORCH."""
    with offered(backend("FAULTY", **with_impl(Faulty))):
        return ServedModel(specs), ServedModel(specs, backend="TORCH")


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_an_exception_in_one_layer_leaves_the_step_to_be_repeated(when):
    faulty, sound = twins({"0": FULL, "1": SLIDING, "2": FULL})
    for model in (faulty, sound):
        model.add("a")
        model.add("b")
        model.step(a=21, b=2)
        model.begin(a=1, b=18)
    Faulty.fails["1"] = when
    outputs: dict[str, list[torch.Tensor]] = {}
    for name in faulty.plan.specs:
        drawn = faulty.draw(name, {"a": 1, "b": 18})
        if name == "1":
            with pytest.raises(RuntimeError, match="kernel of layer 1 failed"):
                faulty.run(name, drawn)
        same = sound.draw(name, {"a": 1, "b": 18})
        outputs[name] = [faulty.run(name, drawn), sound.run(name, same)]
    assert all(torch.equal(*pair) for pair in outputs.values())
    for name, cache in faulty.runtime.kv_caches.items():
        assert torch.equal(cache, sound.runtime.kv_caches[name])
    faulty.finish(a=1, b=18)
    faulty.step(a=1, b=1)


def test_the_whole_step_can_be_begun_again_after_an_exception():
    faulty, sound = twins({"0": FULL, "1": FULL})
    for model in (faulty, sound):
        model.add("a")
        model.step(a=5)
        model.begin(a=17)
    drawn = {name: faulty.draw(name, {"a": 17}) for name in ("0", "1")}
    faulty.run("0", drawn["0"])
    Faulty.fails["1"] = "between"
    with pytest.raises(RuntimeError, match="kernel of layer 1 failed"):
        faulty.run("1", drawn["1"])
    faulty.runtime.begin_step(faulty.batches.step(17))
    for name in ("0", "1"):
        assert torch.equal(faulty.run(name, drawn[name]), sound.run(name, sound.draw(name, {"a": 17})))


def test_a_builder_that_raises_leaves_no_step_begun():
    class Refusing(TorchMetadataBuilder):
        refuses = False

        def build(self, *given: Any, **named: Any) -> Any:
            if Refusing.refuses:
                raise RuntimeError("no plan")
            return super().build(*given, **named)

    with offered(backend("REFUSING", get_builder_cls=lambda: Refusing)):
        model = ServedModel({"0": FULL})
    model.add("a")
    model.step(a=3)
    Refusing.refuses = True
    with pytest.raises(RuntimeError, match="no plan"):
        model.begin(a=1)
    with pytest.raises(BatchError, match="has no step"):
        model.runtime.forward("0", torch.zeros(1, 4, 8))
    Refusing.refuses = False
    model.step(a=1)


# Debug mode


def broken(result: Any, spec: Any = FULL, debug: bool | None = True) -> tuple[ServedModel, Any]:
    """A model with a step begun, whose backend answers `result(output, output_lse)`."""

    class Broken(TorchImpl):
        def attend(self, *given: Any, **named: Any) -> Any:
            output = super().attend(*given, **named)
            return result(output, named.get("output_lse"))

    with offered(backend("BROKEN", **with_impl(Broken))):
        model = ServedModel({"layer": spec}, debug=debug)
    model.add("a")
    model.begin(a=3)
    return model, model.draw("layer", {"a": 3})


def leaves_nan(output: torch.Tensor, lse: Any) -> torch.Tensor:
    output[1:, 2] = torch.nan
    return output


def leaves_nan_in_the_lse(output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    lse[2] = torch.nan
    return output


def writes_elsewhere(output: torch.Tensor, lse: Any) -> torch.Tensor:
    found = output.clone()
    output.fill_(torch.nan)
    return found


FAULTS = {
    "another shape": (
        lambda output, lse: output[:2],
        r"BROKEN gave torch.float32 \(2, 4, 8\) for layer layer, not torch.float32 \(3, 4, 8\)",
    ),
    "another dtype": (
        lambda output, lse: output.half(),
        r"BROKEN gave torch.float16 \(3, 4, 8\) for layer layer, not torch.float32",
    ),
    "no tensor": (lambda output, lse: None, "BROKEN gave None for layer layer"),
    "NaN": (leaves_nan, "BROKEN left NaN in 2 of 3 rows of output of layer layer, the first 1"),
    "a tensor of its own": (writes_elsewhere, "BROKEN left NaN in 3 of 3 rows of output of layer layer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_debug_mode_names_the_backend_at_fault(fault):
    result, message = FAULTS[fault]
    model, drawn = broken(result)
    with pytest.raises(BackendFaultError, match=message):
        model.run("layer", drawn)


def test_debug_mode_finds_nan_in_the_lse():
    model, drawn = broken(leaves_nan_in_the_lse, layer(dtype="float32", needs_lse=True))
    with pytest.raises(
        BackendFaultError, match="left NaN in 1 of 3 rows of output_lse of layer layer, the first 2"
    ):
        model.runtime.forward("layer", drawn.query, drawn.key, drawn.value, output_lse=torch.zeros(3, 4))


def test_debug_mode_finds_what_a_backend_left_unwritten():
    class Idle(TorchImpl):
        def attend(self, *given: Any, **named: Any) -> Any:
            return given[6]

    with offered(backend("IDLE", **with_impl(Idle))):
        model = ServedModel({"0": FULL}, debug=True)
    model.add("a")
    model.begin(a=3)
    drawn = model.draw("0", {"a": 3})
    with pytest.raises(BackendFaultError, match="IDLE left NaN in 3 of 3 rows"):
        model.runtime.forward("0", drawn.query, drawn.key, drawn.value, torch.zeros(3, 4, 8))


def test_a_fault_leaves_the_runtime_usable():
    faults = iter([True, False])
    model, drawn = broken(lambda output, lse: leaves_nan(output, lse) if next(faults) else output)
    with pytest.raises(BackendFaultError):
        model.run("layer", drawn)
    model.check("layer", drawn)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_nan_that_came_with_the_call_is_not_the_backends(name):
    model, drawn = broken(lambda output, lse: output)
    getattr(drawn, name)[1] = torch.nan
    with pytest.raises(
        BatchError, match=rf"{name}\[1\]=nan of layer layer must not be NaN: the value was passed to the call"
    ):
        model.run("layer", drawn)


OFF = (None, "", " ", "0", "00", "false", "No", "OFF")


@pytest.mark.parametrize(
    ("value", "debug"),
    [*((each, False) for each in OFF), *((each, True) for each in ("1", "01", "True", "on"))],
)
def test_the_environment_turns_debug_mode_on(value, debug, monkeypatch):
    if value is None:
        monkeypatch.delenv("ATTNPLUG_DEBUG", raising=False)
    else:
        monkeypatch.setenv("ATTNPLUG_DEBUG", value)
    model, drawn = broken(leaves_nan, debug=None)
    assert model.runtime.debug is debug
    if debug:
        with pytest.raises(BackendFaultError):
            model.run("layer", drawn)
    else:
        assert model.run("layer", drawn).isnan().any()


@pytest.mark.parametrize("value", ["2", "maybe", "-1", "none", "1,0", "tru"])
def test_a_value_that_is_neither_on_nor_off_is_refused_with_the_variable(value, monkeypatch):
    monkeypatch.setenv("ATTNPLUG_DEBUG", value)
    with pytest.raises(PolicyError, match=f"ATTNPLUG_DEBUG='{value}' must be 1 or 0"):
        broken(leaves_nan, debug=None)
    broken(leaves_nan, debug=False)


# What a runtime does with its backends' parts


def test_weights_are_announced_to_every_impl():
    seen = []

    class Repacking(TorchImpl):
        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            seen.append((self.layer_name, act_dtype))

    with offered(backend("REPACKING", **with_impl(Repacking))):
        AttentionRuntime(plan({"0": FULL, "1": layer(has_sinks=False)}, "cpu", num_blocks=4))
    assert seen == [("0", torch.float32), ("1", torch.bfloat16)]


def test_a_latent_comes_without_a_value():
    written = []

    class Latent(TorchImpl):
        def update_kv_cache(self, *given: Any) -> None:
            written.append([tuple(tensor.shape) for tensor in given[1:4]])

        def attend(self, *given: Any, **named: Any) -> Any:
            return given[6].zero_()

    dims = MLADims(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
    spec = LayerSpec(num_heads=2, num_kv_heads=1, head_size=10, mla=dims, dtype="float32")
    with offered(backend("LATENT", features=Feature.MLA, **with_impl(Latent))):
        model = AttentionRuntime(plan({"0": spec}, "cpu", num_blocks=4))
    batches = model.step_batch_builder(16)
    batches.add_request("a", [model.block_pool.allocate(1)])
    model.begin_step(batches.step(3))
    assert model.forward("0", torch.zeros(3, 2, 6), torch.zeros(3, 1, 10)).shape == (3, 2, 4)
    assert written == [[(3, 1, 10), (3, 1, 8), (4, 16, 10)]]


def test_one_workspace_serves_layers_with_pages_and_layers_without():
    class Workspace(TorchMetadataBuilder):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.buffer: torch.Tensor | None = None
            self.workspace_bytes = 16

        def get_workspace_buffer(self) -> torch.Tensor:
            if self.buffer is None:
                self.buffer = torch.zeros(4)
            return self.buffer

        def set_workspace_buffer(self, buffer: torch.Tensor) -> None:
            self.buffer = buffer

    encoder = layer(dtype="float32", attn_type="encoder", direct_kv=True)
    specs = {"near": encoder.replace(window=(2, 2)), "far": encoder}
    with offered(backend("WORKSPACE", get_builder_cls=lambda: Workspace)):
        mixed = AttentionRuntime(plan({**specs, "0": FULL}, "cpu", num_blocks=4))
        direct = AttentionRuntime(plan(specs, "cpu"))
    for runtime, count in ((mixed, 3), (direct, 2)):
        groups = [*runtime.attention_groups, *runtime._direct_groups]
        assert len(groups) == count
        assert len({group.builder.get_workspace_buffer().data_ptr() for group in groups}) == 1


def test_options_reach_the_impl_and_layers_are_told_to_builders():
    runtime = AttentionRuntime(plan({"0": FULL}, "cpu", num_blocks=4), {"0": LayerTensors()})
    assert runtime.config.layers["0"] is runtime.layers["0"]
    assert runtime.attention_groups[0].builder.config is runtime.config


def test_direct_outputs_are_checked_too():
    encoder = layer(dtype="float32", attn_type="encoder", direct_kv=True)

    class Broken(TorchImpl):
        def attend(self, *given: Any, **named: Any) -> Any:
            return leaves_nan(super().attend(*given, **named), None)

    with offered(backend("BROKEN", **with_impl(Broken))):
        runtime = AttentionRuntime(plan({"e": encoder}, "cpu"), debug=True)
    batch = direct_batch(encoder, [4], [4])
    runtime.begin_step(direct=batch.common)
    with pytest.raises(BackendFaultError, match="BROKEN left NaN in 3 of 4 rows of output of layer e"):
        runtime.forward("e", batch.query, batch.key, batch.value)


@pytest.mark.parametrize("made", [None, {}, "metadata"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_builder_that_builds_no_metadata_is_named_without_debug_mode(made, alone):
    class Builder(TorchMetadataBuilder):
        def build(self, *given: Any, **named: Any) -> Any:
            return made

    with offered(backend("EMPTY", get_builder_cls=lambda: Builder)):
        model = ServedModel({"0": FULL}, backend="EMPTY" if alone else "EMPTY+TORCH")
        model.add("a")
        with pytest.raises(BackendFaultError, match="EMPTY: build of its builder returned"):
            model.step(a=21)
