"""One layer of a runtime: its impl, scales and cache, and the checks of its calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from attnplug.core.arguments import instance
from attnplug.core.dtypes import output_quant_key
from attnplug.core.errors import BackendFaultError, BatchError, LayoutError, SpecError
from attnplug.core.impl import AttentionImpl, LayerTensors, host_scale
from attnplug.core.interface.impl_and_builder import make_impl
from attnplug.core.spec import LayerSpec
from attnplug.ops.checks import check_written
from attnplug.ops.shared_memory import byte_span, overlaps_itself, share_memory
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.caches.memory_overlap import NO_CACHES
from attnplug.runtime.plan.model_plan import ModelPlan

_LEARNED = ("sinks", "alibi_slopes", "w_uk", "w_uv", "kv_b_proj")
"""The fields of LayerTensors that are moved to the runtime's device."""


class RuntimeLayer:
    """One layer as its impl sees it: implements the AttentionLayer protocol, and has the cache.

    Args:
        name: its name in the plan.
        decision: its decision, with backend and spec.
        tensors: its sinks, slopes and scales; moved to `device`.
        device: of the layer.
        target: the layer whose pages it reads and never writes, or None.

    Raises:
        SpecError: a tensor is missing, not needed, or of another shape or value; the error names the layer.
    """

    def __init__(
        self,
        name: str,
        decision: Decision,
        tensors: LayerTensors,
        device: torch.device,
        target: str | None = None,
    ) -> None:
        self.name, self.target = name, target
        self._owner = f"of layer {name} "
        self.backend = str(decision.backend)
        self.spec: LayerSpec = decision.spec
        self.kv_cache: torch.Tensor | None = None
        self.cache_memory = NO_CACHES
        """The caches of all layers of the runtime, which no output may be in."""
        self._q_scale_float = self._prob_scale_float = 1.0
        self._k_scale_float, self._v_scale_float = (
            host_scale(scale, self.spec) for scale in (tensors.k_scale, tensors.v_scale)
        )
        self._q_scale = self._prob_scale = torch.ones((), device=device)
        # In float32 too where an engine has set another default dtype.
        self._k_scale, self._v_scale = (
            torch.tensor(scale, dtype=torch.float32, device=device)
            for scale in (self._k_scale_float, self._v_scale_float)
        )
        # "cuda" means the current GPU, which only a tensor's device tells.
        self._device = self._k_scale.device
        self._dtype: torch.dtype = getattr(torch, self.spec.dtype)
        self._query = (self.spec.num_heads, self.spec.query_size)
        self._output = (self.spec.num_heads, self.spec.output_size)
        self._keys = (self.spec.num_kv_heads, self.spec.head_size)
        self._values = (self.spec.num_kv_heads, self.spec.head_size_v)
        # As numbers, because check() would skip scales in tensors.
        k_scale, v_scale = self._k_scale_float, self._v_scale_float
        _check(name, dataclasses.replace(tensors, k_scale=k_scale, v_scale=v_scale), self.spec)
        given = {each: getattr(tensors, each) for each in _LEARNED}
        # A model's own projection is on the device already.
        moved: dict[str, Any] = {
            field: tensor.to(device) for field, tensor in given.items() if isinstance(tensor, torch.Tensor)
        }
        backend = decision.get_backend_cls()
        self.impl: AttentionImpl[Any] = make_impl(
            backend,
            self.spec,
            layer_name=name,
            tensors=dataclasses.replace(tensors, **moved),
            kv_sharing_target_layer_name=target,
            options=decision.get_options(),
        )
        self.impl.process_weights_after_loading(self._dtype)

    def new_output(self, query: torch.Tensor) -> torch.Tensor:
        """An uninitialised output `[T, H, Dv]` for `query [T, H, D]`."""
        return query.new_empty((query.shape[0], *self._output), dtype=self._dtype)

    def check_call(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor | None,
        output_lse: torch.Tensor | None,
        tokens: int,
        keys: int,
    ) -> None:
        """BatchError if arguments do not fit a step of `tokens` queries and `keys` new keys."""
        dtype = None if self.impl.supports_quant_query_input else self._dtype
        self._check("query", query, tokens, self._query, dtype)
        if output is not None:
            self._check("output", output, tokens, self._output, self._dtype)
            self._check_written("output", output)
            self._check_apart("output", output, query=query, key=key, value=value, output_lse=output_lse)
        if output_lse is not None:
            if not self.spec.needs_lse:
                shape = tuple(self._tensor("output_lse", output_lse, "must be None").shape)
                remedy = "declare the layer with needs_lse=True"
                raise BatchError("output_lse", shape, self._of_layer("must be None"), remedy)
            self._check("output_lse", output_lse, tokens, self._output[:1], torch.float32)
            self._check_written("output_lse", output_lse)
            self._check_apart("output_lse", output_lse, query=query, key=key, value=value)
        # The layer never writes to the pages that it reads, so keys in the call would be lost.
        if self.target is not None:
            if key is not None or value is not None:
                limit = f"must be None, like value: it reads the pages of layer {self.target}"
                name, found = ("value", value) if key is None else ("key", key)
                raise BatchError(name, tuple(self._tensor(name, found, limit).shape), self._of_layer(limit))
            return
        if key is None:
            if keys or self.spec.direct_kv:
                raise BatchError("key", None, self._of_layer(f"is required: the step has {keys} new keys"))
            if value is not None:
                limit = "must be None if key is None"
                shape = tuple(self._tensor("value", value, limit).shape)
                raise BatchError("value", shape, self._of_layer(limit))
            return
        self._check("key", key, keys, self._keys, self._dtype)
        if value is not None:
            self._check("value", value, keys, self._values, self._dtype)
        elif self.spec.mla is None:
            raise BatchError("value", None, self._of_layer("is required with a key"))

    def check_quantised(
        self,
        output: torch.Tensor | None,
        output_scale: torch.Tensor | None,
        output_block_scale: torch.Tensor | None,
        tokens: int,
        **read: torch.Tensor | None,
    ) -> None:
        """BatchError unless the layer's impl writes outputs of this dtype, with these scales, for `tokens` rows."""
        name = "output_block_scale" if output_scale is None else "output_scale"
        if output is None:
            limit = self._of_layer(f"is required with {name}: its dtype says the quantisation")
            raise BatchError("output", None, limit)
        self._tensor("output", output)
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        for field, scale in scales.items():
            if scale is not None and self._tensor(field, scale).device != self._device:
                limit = self._of_layer(f"must be {self._device}")
                raise BatchError(f"{field}.device", str(scale.device), limit)
        by_block = output_block_scale is not None
        key = output_quant_key(output.dtype, by_block)
        if key is None or not self.impl.fused_output_quant_supported(key):
            limit = self._of_layer(f"must be None: {self.backend} quantises no outputs to {output.dtype}")
            raise BatchError(name, "given", limit, "quantise the output after attention")
        if output_scale is not None and (output_scale.numel() != 1 or output_scale.dtype != torch.float32):
            found = f"{output_scale.dtype} {tuple(output_scale.shape)}"
            raise BatchError("output_scale", found, self._of_layer("must be one torch.float32"))
        if output_block_scale is not None and output_block_scale.shape[:1] < (tokens,):
            limit = self._of_layer(f"must have at least {tokens} rows in this step")
            raise BatchError("output_block_scale", tuple(output_block_scale.shape), limit)
        heads, size = self._output
        # nvfp4 keeps two values in each byte.
        tail = (heads, size // 2) if key == "nvfp4" else (heads, size)
        self._check("output", output, tokens, tail, None)
        self._check_written("output", output)
        self._check_apart("output", output, **read, **scales)
        if output_block_scale is not None:
            self._check_written("output_block_scale", output_block_scale)
            self._check_apart("output_block_scale", output_block_scale, **read, output_scale=output_scale)

    def refuse_nan(self, tokens: int, keys: int, **given: torch.Tensor | None) -> None:
        """BatchError for NaN in the arguments, which would otherwise look like a fault of the backend."""
        for name, tensor in given.items():
            rows = _nan_rows(tensor, tokens if name == "query" else keys)
            if rows:
                limit = self._of_layer("must not be NaN: the value was passed to the call")
                raise BatchError(f"{name}[{rows[0]}]", float("nan"), limit)

    def poison(self, output: torch.Tensor, output_lse: torch.Tensor | None, tokens: int) -> None:
        """Fill the outputs with NaN, so that `check_result` finds rows that the backend leaves unwritten."""
        # Outputs that are quantised to integers have no NaN.
        if output.is_floating_point():
            output[:tokens] = torch.nan
        if output_lse is not None:
            output_lse[:tokens] = torch.nan

    def check_result(
        self, found: object, output: torch.Tensor, output_lse: torch.Tensor | None, tokens: int
    ) -> None:
        """BackendFaultError if the backend gave another shape or dtype, or left NaN."""
        shape = tuple(output.shape)
        if not isinstance(found, torch.Tensor) or found.shape != shape or found.dtype != output.dtype:
            seen = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
            raise BackendFaultError(
                f"{self.backend} gave {seen} for layer {self.name}, not {output.dtype} {shape}"
            )
        for name, tensor in (("output", output), ("output_lse", output_lse)):
            rows = _nan_rows(tensor, tokens)
            if rows:
                raise BackendFaultError(
                    f"{self.backend} left NaN in {len(rows)} of {tokens} rows of {name} of layer {self.name}, "
                    f"the first {rows[0]}"
                )

    def _of_layer(self, limit: str) -> str:
        return self._owner + limit

    def _check(
        self, name: str, tensor: torch.Tensor, rows: int, tail: tuple[int, ...], dtype: torch.dtype | None
    ) -> None:
        shape = self._tensor(name, tensor).shape
        # More rows are allowed: callers may pass tensors that are padded past the step's tokens.
        if shape[1:] != tail or shape[0] < rows:
            expected = ", ".join(map(str, (f"at least {rows}", *tail)))
            raise BatchError(
                name, tuple(shape), self._of_layer(f"must have the shape ({expected}) in this step")
            )
        if dtype is not None and tensor.dtype != dtype:
            raise BatchError(f"{name}.dtype", tensor.dtype, self._of_layer(f"must be {dtype}"))
        # Kernels take addresses of any device, and on the wrong one they write nothing that is ever read.
        if tensor.device != self._device:
            found = str(tensor.device)
            raise BatchError(f"{name}.device", found, self._of_layer(f"must be {self._device}"))

    def _tensor(self, name: str, given: object, limit: str = "must be a torch.Tensor") -> torch.Tensor:
        """`given`, if it is a tensor with plain strides, whose shape can be read."""
        if not isinstance(given, torch.Tensor):
            raise BatchError(name, given, self._of_layer(limit))
        if given.layout is not torch.strided or given.is_nested:
            found = "nested" if given.is_nested else given.layout
            raise BatchError(f"{name}.layout", found, self._of_layer("must be torch.strided"))
        return given

    def _check_written(self, name: str, tensor: torch.Tensor) -> None:
        # torch refuses these writes by errors of its own, from inside a backend.
        check_written(name, tensor, owner=self._owner)
        if overlaps_itself(tensor):
            limit = self._of_layer(
                f"with strides {tensor.stride()} must not overlap itself: all of it is written"
            )
            raise BatchError(name, tuple(tensor.shape), limit)

    def _check_apart(self, field: str, written: torch.Tensor, **others: object) -> None:
        """BatchError if what the layer writes shares memory with `others`, or with a cache of the runtime."""
        start, end = byte_span(written)
        for name, tensor in others.items():
            # Tensors of other layouts are refused later, by the checks of their own.
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
                continue
            begin = tensor.data_ptr()
            # Most tensors are contiguous and elsewhere, so this loop calls nothing for them.
            if begin >= end or (begin < start and tensor.is_contiguous() and begin + tensor.nbytes <= start):
                continue
            if share_memory(written, tensor):
                limit = self._of_layer(f"must not be in the memory of {name}, which is used meanwhile")
                raise BatchError(field, tuple(written.shape), limit)
        owner = self.cache_memory.owner_of(written, start, end)
        if owner is not None:
            limit = self._of_layer(f"must not be in the KV cache of layer {owner}")
            raise BatchError(field, tuple(written.shape), limit)


def _check(name: str, tensors: LayerTensors, spec: LayerSpec) -> None:
    try:
        tensors.check(spec)
    except SpecError as error:
        field = f"{error.field} of layer {name}"
        raise SpecError(field, error.value, error.limit, error.remedy) from None


def _nan_rows(tensor: torch.Tensor | None, rows: int) -> list[int]:
    if tensor is None:
        return []
    # Rows past the step's tokens are unspecified, so they may have NaN.
    if not tensor.is_floating_point():
        return []
    return tensor[:rows].isnan().flatten(1).any(1).nonzero().flatten().tolist()


def tensors_of_layers(plan: ModelPlan, given: Mapping[str, LayerTensors]) -> dict[str, LayerTensors]:
    """The tensors of every layer; a layer that reads another layer's pages gets its scales.

    Raises:
        LayoutError: the layer of a tensor is unknown, or its scales differ from those of the pages read. It reads pages
            whose heads have scales of their own, and was not declared with `head_scales`.
    """
    instance("layer_tensors", given, Mapping, LayoutError)  # type: ignore[type-abstract]
    for name, layer_tensors in given.items():
        if name not in plan.decisions:
            raise LayoutError("layer_tensors", name, f"is not one of the plan's {len(plan.decisions)} layers")
        _check(
            name,
            instance(f"layer_tensors[{name!r}]", layer_tensors, LayerTensors, SpecError),
            plan.specs[name],
        )
    tensors = {name: given.get(name, LayerTensors()) for name in plan.decisions}
    for name, target in plan.kv_sharing.items():
        own, writer = tensors[name], tensors[target]
        if plan.specs[target].head_scales and not plan.specs[name].head_scales:
            limit = f"of layer {name} is not that of {target}, whose pages it reads"
            raise LayoutError("head_scales", False, limit, "declare both with head_scales=True")
        for field in ("k_scale", "v_scale"):
            scale, written = (host_scale(getattr(each, field), plan.specs[name]) for each in (own, writer))
            if scale != written and set(scale if isinstance(scale, tuple) else (scale,)) != {1.0}:
                limit = f"of layer {name} is not the {written} of {target}, whose pages it reads"
                raise LayoutError(field, scale, limit, "leave it out")
        tensors[name] = dataclasses.replace(own, k_scale=writer.k_scale, v_scale=writer.v_scale)
    return tensors
