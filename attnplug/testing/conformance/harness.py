"""A builder and its layers, driven one call at a time.

A step in the tensors of another one, because engines fill the same buffers in each step.

Words for layers, requests and sets of numbers in the messages of failing checks.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.config import BuilderConfig
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import AttnplugError
from attnplug.core.impl import AttentionImpl, LayerTensors
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import CheckSkipped, SkipKind, calling, error_context
from attnplug.testing.conformance.layer_names import layer_names
from attnplug.testing.views import between, scales_in_a_table

if TYPE_CHECKING:
    from attnplug.testing.conformance.target import Target

_MOST_RANGES = 4


def layer_words(spec: LayerSpec) -> str:
    """The layer with the values that are not plain, such as "sliding, 4 heads over 2 KV heads of 64, float32"."""
    size = (
        f"{spec.head_size}" if spec.head_size_v == spec.head_size else f"{spec.head_size}/{spec.head_size_v}"
    )
    parts = [" ".join(spec.kinds), f"{spec.num_heads} heads over {spec.num_kv_heads} KV heads of {size}"]
    parts.append(spec.dtype if spec.kv_cache_dtype == "auto" else f"{spec.dtype} over {spec.kv_cache_dtype}")
    parts += [] if spec.causal else ["causal=False"]
    parts += [f"window {spec.window}"] if spec.is_windowed else []
    parts += [f"chunks of {spec.chunk_size}"] if spec.chunk_size else []
    parts += [f"soft cap {spec.logits_soft_cap:g}"] if spec.logits_soft_cap else []
    parts += [f"scale {spec.scale:g}"] if spec.scale != spec.replace(scale=None).scale else []
    parts += [f"sparse {spec.sparse}"] if spec.sparse else []
    parts += [f"invariance {'+'.join(spec.invariance)}"] if spec.invariance else []
    flags = {"sinks": spec.has_sinks, "ALiBi": spec.has_alibi, "mm_prefix": spec.mm_prefix}
    flags |= {"direct K and V": spec.direct_kv, "LSE": spec.needs_lse}
    return ", ".join([*parts, *(name for name, is_set in flags.items() if is_set)])


def path_of(spec: LayerSpec, new: int, total: int) -> str:
    """How a request is computed: idle, encoder, cross, padding, decode, prefill or extend."""
    if new == 0:
        return "idle"
    if spec.is_encoder:
        return "encoder"
    if spec.attn_type is AttentionType.ENCODER_DECODER:
        return "cross"
    if new > total:
        return "padding"
    return "decode" if new == 1 else "prefill" if new == total else "extend"


def request_words(spec: LayerSpec, index: int, new: int, total: int) -> str:
    """A request as a reader finds it in the batch: "request 2 (extend, 5 new of 37 tokens)"."""
    of = f"{new} queries, {total} encoder tokens" if path_of(spec, new, total) == "cross" else None
    return f"request {index} ({path_of(spec, new, total)}, {of or f'{new} new of {total} tokens'})"


def numbers_words(numbers: Iterable[int]) -> str:
    """Sorted numbers as ranges, at most four: "0-3, 7, 9-12, 20 ..."."""
    ordered = sorted(set(numbers))
    runs = []
    for _, run in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(f"{members[0]}" if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs[:_MOST_RANGES]) + (" ..." if len(runs) > _MOST_RANGES else "")


def some_of(noun: str, numbers: Iterable[int], total: int) -> str:
    """Which of `total` things are meant: "all 8 heads", "heads 4-7 of 8", "head 3 of 8"."""
    chosen = sorted(set(numbers))
    if len(chosen) == total:
        return f"all {total} {noun}s" if total > 1 else f"the one {noun}"
    return f"{noun}{'' if len(chosen) == 1 else 's'} {numbers_words(chosen)} of {total}"


class Output(NamedTuple):
    """A backend's answer for T tokens: output `[T, H, Dv]`, and LSE `[T, H]` if the layer needs it."""

    output: torch.Tensor
    lse: torch.Tensor | None


class EngineLayer:
    """The scales that an engine's layer has for its impl, of the AttentionLayer protocol."""

    def __init__(self, batch: Batch) -> None:
        self._q_scale_float = self._prob_scale_float = 1.0
        given = batch.tensors.k_scale, batch.tensors.v_scale
        # The float of vLLM's layers whose heads have scales of their own is the largest of them.
        self._k_scale_float, self._v_scale_float = (
            float(each.max() if isinstance(each, torch.Tensor) else each) for each in given
        )
        scales = (1.0, self._k_scale_float, self._v_scale_float, 1.0)
        table = scales_in_a_table(*scales, device=batch.query.device)
        self._q_scale, self._k_scale, self._v_scale, self._prob_scale = table
        if batch.spec.head_scales:
            self._k_scale, self._v_scale = (torch.as_tensor(each) for each in given)


class HarnessLayer(EngineLayer):
    """A layer as its impl sees it, the AttentionLayer protocol, with the spec and tensors of a batch."""

    def __init__(self, target: Target, name: str, batch: Batch, **shared: Any) -> None:
        super().__init__(batch)
        self.name, self.words = name, f"{name} ({layer_words(batch.spec)})"
        self.impl = make_impl(target.backend, batch.spec, batch.tensors, name, **shared)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Harness:
    """A builder and the layers that it serves, which share pages of one kind or take K and V with the call."""

    layers: tuple[HarnessLayer, ...]
    builder: AttentionMetadataBuilder[Any]

    @classmethod
    def of(
        cls,
        target: Target,
        *batches: Batch,
        names: Sequence[str] = (),
        dcp: ContextParallel | None = None,
        options: Any = None,
        **config: Any,
    ) -> Harness:
        """A layer for each batch and one builder for all; `config` has fields of BuilderConfig.

        The layers are those of a rank of `dcp`, if it is given; without `options` they have those of the target,
        and without `names` those of a model.

        Raises:
            ConformanceError: the backend raises.
            CheckSkipped: the backend refuses a layer, or from_spec the options for it.
        """
        for batch in batches:
            target.require(batch.spec)
        options = target.own_options if options is None else options
        with error_context("from_spec, of a layer that validate_configuration accepts"):
            # An impl of its own from_spec need not know the argument.
            shared: dict[str, Any] = {} if dcp is None else {"dcp": dcp}
            shared |= {} if options is None else {"options": options}
            names = names or layer_names(len(batches), batches[0].spec)
            named = {
                name: HarnessLayer(target, name, batch, **shared)
                for name, batch in zip(names, batches, strict=True)
            }
        with error_context("making the builder"):
            serving = target.backend.for_layer(batches[0].spec)
            builder = _make_builder(serving, batches[0], named, **config)
        return cls(tuple(named.values()), builder)

    @property
    def impl(self) -> AttentionImpl[Any]:
        """The impl of the first layer."""
        return self.layers[0].impl

    def run(
        self,
        batch: Batch,
        metadata: AttentionMetadata,
        *,
        layer: int = 0,
        use_sinks: bool = True,
        writes: bool = True,
    ) -> Output:
        """The batch's own rows of one layer's forward into an output of NaN.

        With `writes=False` the layer is given no key and value: the pages already contain them.
        """
        into, tokens = blank_output(batch), batch.common.num_actual_tokens
        given, driven = _arguments(batch, metadata, into.output, writes), self.layers[layer]
        with calling("forward", driven.words):
            driven.impl.forward(driven, *given, output_lse=into.lse, use_sinks=use_sinks)
        return Output(into.output[:tokens], None if into.lse is None else into.lse[:tokens])

    def build(self, batch: Batch) -> AttentionMetadata:
        """The metadata of the batch's step."""
        with error_context("build"):
            metadata: AttentionMetadata = self.builder.build(0, batch.common)
        return metadata

    def write(self, batch: Batch) -> None:
        """Write the batch's new keys and values with the first layer's `update_kv_cache`."""
        assert batch.kv_cache is not None  # noqa: S101 - called only for batches over pages
        slots = self.build(batch).slot_mapping
        with error_context("update_kv_cache"), calling("update_kv_cache", self.layers[0].words):
            self.impl.update_kv_cache(self.layers[0], batch.key, batch.value, batch.kv_cache, slots)

    def forward(self, batch: Batch, into: Output | None = None, what: str = "forward") -> Output:
        """Call `build` and the first layer's `forward`; returns all rows of `into`, by default NaN before."""
        into = into or blank_output(batch)
        with error_context(what):
            given = _arguments(batch, self.builder.build(0, batch.common), into.output)
            with calling("forward", self.layers[0].words):
                self.impl.forward(self.layers[0], *given, output_lse=into.lse)
        return into

    def attend(self, batch: Batch, *, with_keys: bool = True) -> Output:
        """Call `build` and the first layer's `attend` with rows of NaN; without keys, the pages contain all."""
        into = blank_output(batch)
        with error_context("attend" if with_keys else "attend without key and value, which the pages hold"):
            given = _arguments(batch, self.builder.build(0, batch.common), into.output, with_keys)
            with calling("attend", self.layers[0].words):
                self.impl.attend(self.layers[0], *given, output_lse=into.lse)
        return into


def _arguments(
    batch: Batch, metadata: AttentionMetadata, output: torch.Tensor, with_keys: bool = True
) -> Any:
    key, value = (batch.key, batch.value) if with_keys else (None, None)
    return batch.query, key, value, batch.kv_cache, metadata, output


def make_impl(
    backend: type[AttentionBackend],
    spec: LayerSpec,
    tensors: LayerTensors,
    name: str | None = None,
    **shared: Any,
) -> AttentionImpl[Any]:
    """The impl of a layer, ready to run; `shared` has further arguments of `from_spec`.

    Without `options` among them they are the backend's defaults. The class is that which serves the layer.

    Raises:
        CheckSkipped: from_spec refuses the options that were given. No declaration says which layers they serve.
    """
    backend, given, (drawn,) = backend.for_layer(spec), shared.get("options"), layer_names(1, spec)
    name = name or drawn
    if given is None:
        shared["options"] = None if backend.Options is None else backend.Options()
    words = f"{name} ({layer_words(spec)})"
    with calling("from_spec", words):
        try:
            impl: AttentionImpl[Any] = backend.get_impl_cls().from_spec(
                spec, backend=backend, layer_name=name, tensors=tensors, **shared
            )
        except AttnplugError as problem:
            if given is None:
                raise
            raise CheckSkipped(f"{given}, for {words}: {problem}", SkipKind.OPTIONS) from problem
    with calling("process_weights_after_loading", words):
        impl.process_weights_after_loading(getattr(torch, spec.dtype))
    return impl


def run_batch(
    backend: type[AttentionBackend],
    batch: Batch,
    *,
    use_sinks: bool = True,
    layer: Any = None,
    options: Any = None,
    into: Output | None = None,
    **config: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Build the metadata, write the cache and attend; `config` has fields of BuilderConfig, `options` those of the impl.

    Without `into` the rows are new.

    Returns:
        Output `[T + padding, H, Dv]` and, if the spec needs it, LSE `[T + padding, H]`. Rows that the backend
        did not write are NaN.
    """
    backend = backend.for_layer(batch.spec)
    impl = make_impl(backend, batch.spec, batch.tensors, options=options)
    # Builders that plan read the features to plan for from the impl of their layers.
    (name,) = layer_names(1, batch.spec)
    builder = _make_builder(backend, batch, {name: types.SimpleNamespace(impl=impl)}, **config)
    into = into or blank_output(batch)
    given = _arguments(batch, builder.build(0, batch.common), into.output)
    with calling("forward", f"{name} ({layer_words(batch.spec)})"):
        impl.forward(layer, *given, output_lse=into.lse, use_sinks=use_sinks)
    return into


def _make_builder(
    backend: type[AttentionBackend], batch: Batch, layers: dict[str, Any], **config: Any
) -> AttentionMetadataBuilder[Any]:
    size = batch.spec.block_size or 1
    if batch.kv_cache is not None:
        size = backend.split_kv(batch.kv_cache, batch.spec)[0].shape[1]
    cache: Any = kv_cache_spec_for(batch.spec, size)
    settings = BuilderConfig(layers=layers, **config)
    return backend.get_builder_cls()(cache, list(layers), settings, batch.query.device)


def blank_output(batch: Batch, fill: float = torch.nan) -> Output:
    """Output `[T + padding, H, Dv]` and, if the spec needs it, LSE `[T + padding, H]`, all `fill`: rows of longer ones."""
    spec, query = batch.spec, batch.query
    output = query.new_full((query.shape[0], spec.num_heads, spec.output_size), fill)
    form: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    lse = torch.full(output.shape[:2], fill, **form) if spec.needs_lse else None
    return Output(between(output), None if lse is None else between(lse))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in logical order as bytes on the host, 1-D, so that NaN equals NaN."""
    # A tensor of one element is contiguous with any stride, and its bytes are not.
    dense = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8)


_INPUTS = ("query", "key", "value", "kv_cache")


def refill(batch: Batch, fresh: Batch) -> Batch:
    """The step `fresh` in the tensors and arrays of `batch`; those of other shapes stay its own."""
    names = [field.name for field in dataclasses.fields(fresh.common) if not field.name.startswith("_")]
    common = {name: _fill(getattr(batch.common, name), getattr(fresh.common, name)) for name in names}
    inputs = {name: _fill(getattr(batch, name), getattr(fresh, name)) for name in _INPUTS}
    return dataclasses.replace(fresh, common=dataclasses.replace(fresh.common, **common), **inputs)


def _fill(buffer: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(buffer, torch.Tensor) and buffer.shape == value.shape:
        return buffer.copy_(value)
    if isinstance(value, np.ndarray) and isinstance(buffer, np.ndarray) and buffer.shape == value.shape:
        np.copyto(buffer, value)
        return buffer
    return value
