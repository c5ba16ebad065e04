"""The base of latent attention: what a decode gets, and what the base does around it."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.backend import TorchMLABackend
from attnplug.core import (
    BuilderConfig,
    DenseProjection,
    Device,
    Feature,
    LayerSpec,
    LayerTensors,
    MLADims,
    Phase,
    QueryLens,
)
from attnplug.core.errors import BatchError, LayoutError, PluginError, SpecError
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.mla import MLADecodeBuilder, MLADecodeImpl, packed_query
from attnplug.registry import Registry
from attnplug.testing import assert_close, paged_batch, run_batch, tolerance
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.cases import joint_weights

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
SPEC = LayerSpec(num_heads=6, num_kv_heads=1, head_size=40, mla=DIMS, dtype="float32")
CPU = Device("cpu")


def declared(loop: Any, **attributes: Any) -> Any:
    """The backend with other declarations, and with TORCH for prefills."""
    for name, value in attributes.items():
        setattr(loop, name, value)
    return loop.with_prefill(TorchBackend)


def is_right(backend: Any, batch: Batch, **config: Any) -> bool:
    output, _ = run_batch(backend, batch, **config)
    tokens = batch.common.num_actual_tokens
    assert_close(output[:tokens], batch.oracle().output, tolerance(batch.spec).output)
    return True


@pytest.mark.parametrize(
    ("query_lens", "threshold", "decoded"),
    [
        (QueryLens.SINGLE, 8, [1, 1]),
        (QueryLens.UNIFORM, 8, [1, 1]),
        (QueryLens.ANY, 1, [1, 0, 1]),
        (QueryLens.ANY, 8, [1, 0, 1, 3, 8, 5]),
    ],
)
def test_a_decode_gets_the_query_lengths_that_it_declares(
    loop: Any, query_lens: QueryLens, threshold: int, decoded: list[int]
) -> None:
    backend = declared(loop, query_lens=query_lens, decode_threshold=threshold)
    batch = paged_batch(SPEC, [1, 0, 1, 3, 8, 5, 20], [30, 9, 40, 3, 70, 6, 33], padding=2)
    assert is_right(backend, batch)
    ((q_nope, _, metadata),) = loop.calls
    assert metadata.query_start_loc_cpu.diff().tolist() == decoded
    assert (metadata.num_reqs, metadata.num_actual_tokens) == (len(decoded), sum(decoded))
    assert q_nope.shape[0] == sum(decoded)


def test_uniform_decodes_have_the_length_of_the_first(loop: Any) -> None:
    backend = declared(loop, query_lens="uniform", decode_threshold=4)
    assert is_right(backend, paged_batch(SPEC, [0, 3, 3, 0, 3, 2, 3], [4, 30, 9, 8, 3, 50, 60]))
    ((_, _, metadata),) = loop.calls
    assert metadata.query_start_loc_cpu.diff().tolist() == [3, 3, 3]


def test_drafts_past_the_declared_threshold_are_prefilled_unless_the_builder_decodes_them(loop: Any) -> None:
    backend = declared(loop, query_lens="any", decode_threshold=4)
    batch = paged_batch(SPEC, [4, 5, 5], [30, 9, 50])
    assert is_right(backend, batch, num_speculative_tokens=4)
    free = type("Free", (MLADecodeBuilder,), {"decodes_drafts": True})
    loop.get_builder_cls = staticmethod(lambda: free)
    assert is_right(backend, batch, num_speculative_tokens=4)
    assert [metadata.query_start_loc_cpu.tolist() for *_, metadata in loop.calls] == [[0, 4], [0, 4, 9, 14]]


def test_a_graph_of_longer_queries_than_decodes_have_is_refused(loop: Any) -> None:
    impl = loop.get_impl_cls().from_spec(
        SPEC, backend=loop, layer_name="0", tensors=paged_batch(SPEC, [1], [1]).tensors
    )
    config = BuilderConfig(layers={"0": types.SimpleNamespace(impl=impl)})
    builder = MLADecodeBuilder(kv_cache_spec_for(SPEC, 16), ["0"], config, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="max_query_len=2 is past the 1 that LOOP decodes, and no graph has"):
        builder.build_for_cudagraph_capture(paged_batch(SPEC, [2, 2], [9, 9]).common)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("query_layout", "spilt"),
        ("query_lens", "several"),
        ("decode_threshold", 0),
        ("latent_sizes", (32, 8)),
        ("latent_sizes", ((32, -1),)),
        ("padded_heads", classmethod(lambda cls, num_heads: 4)),
    ],
)
def test_a_declaration_without_meaning_is_a_reason(loop: Any, attribute: str, value: Any) -> None:
    setattr(loop, attribute, value)
    plugin = types.SimpleNamespace(ATTNPLUG_API=(1, 1), attnplug_backends=attnplug.hookimpl(lambda: [loop]))
    registry = Registry()
    registry.register(plugin, name="wrong")
    decision = registry.explain(SPEC, "cpu", phase="decode")
    (refused,) = [each for each in decision.refused if each.name == "LOOP"]
    assert f"raised SpecError: {attribute}=" in refused.reasons[0]
    assert decision.backend == "TORCH"


@pytest.mark.parametrize("layout", ["split", "packed"])
@pytest.mark.parametrize("padded", [6, 16])
def test_queries_come_in_the_declared_layout_with_the_padded_heads(
    loop: Any, layout: str, padded: int
) -> None:
    heads = classmethod(lambda cls, num_heads: padded)
    backend = declared(loop, query_layout=layout, padded_heads=heads)
    assert is_right(backend, paged_batch(SPEC.replace(needs_lse=True), [1, 1], [30, 9]))
    ((q_nope, q_pe, _),) = loop.calls
    assert q_nope.shape == (2, padded, 32)
    assert q_pe.shape == (2, padded, 8)
    assert not q_nope[:, 6:].any()
    if layout == "packed":
        assert torch.equal(packed_query(q_nope, q_pe), torch.cat((q_nope, q_pe), 2))
        assert packed_query(q_nope, q_pe).data_ptr() == q_nope.data_ptr()
    else:
        assert q_nope.is_contiguous()
        assert q_pe.is_contiguous()
    assert backend.notes(SPEC) == (() if padded == 6 else ("6 heads padded to 16",))


def test_weights_are_two_tensors_or_the_models_one_or_products(loop: Any) -> None:
    backend = declared(loop)
    batch = paged_batch(SPEC, [1, 7, 20], [30, 9, 60])
    assert is_right(backend, batch)
    joint = joint_weights(batch)
    assert is_right(backend, joint)
    dense = DenseProjection.of(joint.tensors.kv_b_proj, 12, 10)  # type: ignore[arg-type]
    used: list[str] = []

    class Quantised:
        """Products that a model computes, with a record."""

        def __getattr__(self, name: str) -> Any:
            used.append(name)
            return getattr(dense, name)

        def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
            used.append("absorb")
            return dense.absorb(q_nope)

        def project(self, latent: torch.Tensor) -> torch.Tensor:
            used.append("project")
            return dense.project(latent)

        def expand(self, kv_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            used.append("expand")
            return dense.expand(kv_c)

    tensors = dataclasses.replace(joint.tensors, kv_b_proj=Quantised())
    output, _ = run_batch(backend, dataclasses.replace(joint, tensors=tensors))
    assert_close(output, batch.oracle().output, tolerance(SPEC).output)
    assert {"absorb", "project", "expand"} <= set(used)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "kv_b_proj=None is required: the layer has mla"),
        ({"w_uk": torch.zeros(6, 12, 32)}, "give w_uk and w_uv, or kv_b_proj alone"),
        ({"kv_b_proj": torch.zeros(6 * 22, 31)}, r"must be float32 \(132, 32\)"),
        ({"kv_b_proj": torch.zeros(6 * 22, 32, dtype=torch.int8)}, "give the products as a LatentProjection"),
        ({"kv_b_proj": "weights"}, "absorb, project and expand"),
        ({"w_uk": torch.zeros(6, 12, 32), "w_uv": torch.zeros(6, 10, 32)}, r"must be float32 \(6, 32, 10\)"),
    ],
)
def test_weights_that_are_missing_or_of_another_layer_are_refused(loop: Any, given: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        loop.get_impl_cls().from_spec(SPEC, backend=loop, layer_name="0", tensors=LayerTensors(**given))


def test_layers_without_latents_take_no_weights() -> None:
    plain = LayerSpec(num_heads=6, num_kv_heads=6, head_size=8, dtype="float32")
    with pytest.raises(SpecError, match="is for layers with mla"):
        LayerTensors(w_uk=torch.zeros(6, 12, 32)).check(plain)


def test_the_scale_of_8_bit_latents_is_in_the_softmax_scale_and_in_the_output(loop: Any) -> None:
    backend = declared(loop)
    scales: list[float] = []

    class Recording(loop.get_impl_cls()):  # type: ignore[misc]
        def decode(self, *given: Any) -> None:
            scales.append(self.softmax_scale)
            super().decode(*given)

    backend = type("Scaled", (backend,), {"get_impl_cls": classmethod(lambda cls: Recording)})
    spec = SPEC.replace(kv_cache_dtype="fp8")
    assert is_right(backend, paged_batch(spec, [1, 1, 20], [30, 9, 50], k_scale=0.02))
    assert scales == [pytest.approx(spec.scale * 0.02)]


@pytest.mark.parametrize("rows", [16, 17, 64, None])
def test_chunks_of_any_size_give_the_numbers_of_one_pass(loop: Any, rows: int | None) -> None:
    config = {} if rows is None else {"context_chunk_rows": rows}
    batch = paged_batch(SPEC, [20, 18, 40, 33], [120, 18, 171, 90])
    assert is_right(declared(loop), batch, **config)


def test_many_chunks_round_no_more_than_few(loop: Any) -> None:
    spec, backend = SPEC.replace(dtype="bfloat16"), declared(loop)
    batch = paged_batch(spec, [20], [520], block_size=1)
    exact = batch.oracle().output
    errors = []
    for rows in (256, 2):
        output, _ = run_batch(backend, batch, context_chunk_rows=rows)
        errors.append(float((output.double() - exact).norm() / exact.norm()))
    assert errors[1] < 1.5 * errors[0]


def test_prefills_of_padding_alone_have_no_keys(loop: Any) -> None:
    bound = declared(loop, query_lens="uniform", decode_threshold=8)
    assert is_right(bound, paged_batch(SPEC, [5, 5, 1], [21, 6, 0]))


def test_a_subclass_of_torch_gets_the_heads_that_it_pads() -> None:
    padded = {"padded_heads": classmethod(lambda cls, num_heads: 16)}
    assert is_right(type("Padded", (TorchMLABackend,), padded), paged_batch(SPEC, [1, 1], [30, 9]))


def test_a_backend_alone_decodes_only_and_says_so(loop: Any) -> None:
    assert [reason.code for reason in loop.validate_configuration(SPEC, CPU)] == ["phase"]
    assert loop.validate_configuration(SPEC, CPU, Phase.DECODE) == []
    with pytest.raises(BatchError, match=r"is past the 1 of a decode, and LOOP decodes only.*with_prefill"):
        run_batch(loop, paged_batch(SPEC, [20], [30]))


def test_both_halves_have_one_class_and_the_prefill_half_gives_its_reasons(loop: Any) -> None:
    bound = loop.with_prefill(TorchBackend)
    assert bound is loop.with_prefill(TorchBackend) is bound.with_prefill(TorchBackend)
    assert bound.get_name() == "TORCH+LOOP"
    assert bound.validate_configuration(SPEC, CPU) == []

    class NoLse(TorchBackend):
        features = TorchBackend.features & ~type(TorchBackend.features).LSE

    (reason,) = loop.with_prefill(NoLse).validate_configuration(SPEC, CPU)
    assert reason == "expanded prefill on TORCH: lse not supported"
    assert loop.with_prefill(NoLse).validate_configuration(SPEC, CPU, Phase.DECODE) == []


@pytest.mark.parametrize(
    "asked", [{"sliding_window": 8}, {"logits_soft_cap": 3.0}, {"has_sinks": True}, {"has_alibi": True}]
)
def test_what_the_base_does_not_carry_out_is_refused_even_where_it_is_declared(loop: Any, asked: Any) -> None:
    loop.features = ~(Feature.SPARSE | Feature.STATE)
    (reason,) = loop.validate_configuration(SPEC.replace(**asked), CPU, Phase.DECODE)
    assert str(reason).endswith("not supported with MLA")


def test_pairs_that_are_not_listed_are_refused(loop: Any) -> None:
    loop.latent_sizes = ((32, 8), (64, 8))
    assert loop.validate_configuration(SPEC, CPU, Phase.DECODE) == []
    other = dataclasses.replace(DIMS, kv_lora_rank=36, qk_rope_head_dim=4)
    (reason,) = loop.validate_configuration(SPEC.replace(mla=other), CPU, Phase.DECODE)
    assert "36+4 is not one of 32+8, 64+8" in reason


def test_a_batch_that_is_not_causal_or_whose_lengths_the_host_does_not_know_is_refused(loop: Any) -> None:
    batch = paged_batch(SPEC, [1], [30])
    for change in ({"causal": False}, {"seq_lens_host": None}, {"seq_lens_host_exact": False}):
        with pytest.raises(BatchError, match=next(iter(change)).removesuffix("_exact")):
            run_batch(loop, dataclasses.replace(batch, common=dataclasses.replace(batch.common, **change)))


def test_pages_of_another_size_are_refused(loop: Any) -> None:
    batch = paged_batch(SPEC, [1], [30])
    assert batch.kv_cache is not None
    with pytest.raises(LayoutError, match=r"must have the shape \(num_blocks, block_size, 40\)"):
        run_batch(loop, dataclasses.replace(batch, kv_cache=batch.kv_cache[..., :39]))


def test_a_builder_without_the_layers_impl_says_what_to_give(loop: Any) -> None:
    with pytest.raises(PluginError, match="make the layers' impls first"):
        MLADecodeBuilder(None, ["0"], BuilderConfig(), torch.device("cpu"))  # type: ignore[arg-type]


def test_an_author_writes_only_the_decode() -> None:
    assert MLADecodeImpl.__abstractmethods__ == {"decode"}


def test_a_decision_says_that_heads_are_padded(loop: Any) -> None:
    loop.padded_heads = lambda heads: 16
    hook = attnplug.hookimpl(lambda: [loop])
    plugin = types.SimpleNamespace(ATTNPLUG_API=(1, 1), attnplug_backends=hook)
    registry = Registry()
    registry.register(plugin, name="pads")
    asked: Any = {"phase": "decode", "backend": "LOOP"}
    notes = [registry.select(SPEC.replace(num_heads=n), "cpu", **asked).notes for n in (6, 16)]
    assert notes == [("6 heads padded to 16",), ()]


@pytest.mark.parametrize("joint", [True, False])
def test_products_that_are_written_into_views_are_those_that_are_returned(joint: bool) -> None:
    weight = torch.randn(3 * 11, 8)
    given = DenseProjection.of(weight, 6, 5)
    if not joint:
        given = DenseProjection(given.w_uk.contiguous(), given.w_uv.contiguous())
    kv_c = torch.randn(9, 12)[:, :8]
    key, value = torch.full((9, 3, 10), 7.0), torch.empty(9, 3, 5)
    given.expand_into(kv_c, key[..., :6], value)
    for found, expected in zip((key[..., :6], value), given.expand(kv_c), strict=True):
        assert_close(found, expected, 1e-6)
    assert (key[..., 6:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nan_of_one_row_reaches_no_other_row_of_a_projection(dtype: torch.dtype) -> None:
    weights = DenseProjection(torch.ones(2, 24, 54, dtype=dtype), torch.ones(2, 54, 48, dtype=dtype))
    latent, queries = torch.ones(30, 2, 54, dtype=dtype), torch.ones(30, 2, 24, dtype=dtype)
    latent[2] = queries[2] = float("nan")
    found = (weights.project(latent), weights.absorb(queries), *weights.expand(latent[:, 0]))
    for each in found:
        assert each.dtype == dtype
        assert each.isnan().flatten(1).any(1).nonzero().flatten().tolist() == [2]
