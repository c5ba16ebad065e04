"""The tensors of one step for one layer, made on the device: random pages in random order, and as many copies as the L2 cannot hold.

Also the check before timing: some rows of a backend's output against the float64 oracle.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.features import Feature
from attnplug.core.impl import LayerTensors
from attnplug.core.interface.answers import answer, declared
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import LayerSpec, Phase
from attnplug.ops.storage import STORAGE_DTYPES
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.testing.comparison import assert_close, tolerance
from attnplug.testing.drawn_values import layer_tensors
from attnplug.testing.oracle import OracleResult, request_oracle
from attnplug.testing.views import with_own_memory
from attnplug.tuning.timers import least_bytes

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.impl import AttentionImpl
    from attnplug.core.metadata import AttentionMetadataBuilder
    from attnplug.registry.selection.evidence import Pages

SharedCaches: TypeAlias = dict[Hashable, list[torch.Tensor]]
"""Caches of one step by their sizes, strides and dtype."""
_MOST_COPIES = 8
_SEED = 0


@dataclasses.dataclass(slots=True, eq=False)
class StepInputs:
    """The inputs of a step: queries, new keys and values, caches, and the common metadata.

    Args:
        spec: the layer.
        shape: the step.
        common: the metadata of the step.
        query: `[T, H, query_size]`.
        key: the new keys `[T, Hkv, D]`, equal to those in the first cache; all keys with direct KV.
        value: the values of `key`; None with MLA, whose latents contain them.
        caches: copies of the cache with unlike numbers; empty with direct KV.
        output: `[T, H, output_size]`.
        lse: float32 `[T, H]` if the layer needs it.
        tensors: sinks, slopes, scales and weights of the layer.
        keys: gives all keys and values of a request, `[seq_len, Hkv, ...]`, from the first cache.
        quantized_queries: whether the backend rounds queries to 8 bits, as it declares.
    """

    spec: LayerSpec
    shape: StepShape
    common: CommonAttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None
    caches: list[torch.Tensor]
    output: torch.Tensor
    lse: torch.Tensor | None
    tensors: LayerTensors
    keys: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    quantized_queries: bool

    def forward(self, impl: AttentionImpl[Any], metadata: Any) -> Callable[[int], object]:
        """The forward of a layer, as a model calls it: it writes the new keys and values, and attends."""
        # A layer with latents is called as one without, except for the value.
        kwargs: dict[str, Any] = {} if self.lse is None else {"output_lse": self.lse}

        def call(index: int) -> object:
            cache = self.caches[index % len(self.caches)] if self.caches else None
            return impl.forward(
                None, self.query, self.key, self.value, cache, metadata, self.output, **kwargs
            )

        return call

    def last_steps(self, count: int) -> list[CommonAttentionMetadata]:
        """The batches of some steps in turn, this one last: before it, each request had a token less."""
        # An engine builds for such steps: a builder that is given one step again may have nothing left to do.
        host, least = (
            np.asarray(each, dtype=np.int32) for each in (self.shape.lengths, self.shape.query_lens)
        )
        found = []
        for back in reversed(range(count)):
            lengths = np.maximum(host - back, least)
            on_device = torch.from_numpy(lengths.copy()).to(self.common.seq_lens.device)
            longest = int(lengths.max())
            found.append(
                dataclasses.replace(
                    self.common, seq_lens=on_device, seq_lens_host=lengths, max_seq_len=longest
                )
            )
        return found


def made_inputs(
    backend: type[AttentionBackend],
    spec: LayerSpec,
    shape: StepShape,
    pages: Pages,
    device: torch.device,
    *,
    copies: bool = True,
    made: SharedCaches | None = None,
) -> StepInputs:
    """The inputs for one backend with its pages; equal seeds give equal numbers.

    With `copies` there are as many caches as the L2 cannot hold; a check of the output needs one. The backends of one
    step share caches of equal form by `made`.

    Raises:
        RuntimeError: the device has too little memory.
    """
    torch.manual_seed(_SEED)
    dtype = STORAGE_DTYPES[spec.dtype]
    lengths, news, count = shape.lengths, shape.query_lens, shape.tokens

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype)

    query = random(count, spec.num_heads, spec.query_size)
    caches: list[torch.Tensor] = []
    if pages is None:
        table = torch.zeros(shape.requests, 1, dtype=torch.int32)
        slots = torch.full((count,), -1, dtype=torch.int64)
        key = random(sum(lengths), spec.num_kv_heads, spec.head_size)
        values = random(sum(lengths), spec.num_kv_heads, spec.head_size_v)
        value: torch.Tensor | None = values
        ends = np.cumsum([0, *lengths]).tolist()

        def keys(request: int) -> tuple[torch.Tensor, torch.Tensor]:
            rows = slice(ends[request], ends[request + 1])
            return key[rows], values[rows]

    else:
        size, layout = pages
        table, blocks = _random_table(lengths, size)
        caches = _caches(
            backend, spec, shape, (blocks, size, layout), device, {} if made is None else made, copies=copies
        )
        stored_key, stored_value = answer(backend, "split_kv", caches[0], spec)
        on_device = table.to(device)

        def keys(request: int) -> tuple[torch.Tensor, torch.Tensor]:
            used = on_device[request, : -(-lengths[request] // size)].long()
            k, v = (each[used].flatten(0, 1)[: lengths[request]] for each in (stored_key, stored_value))
            return k, v

        slots = _slots(table, lengths, news, size)
        # The new tokens are those that the first cache has, so that writing them changes nothing there.
        new = [[each[-count:] for each in keys(request)] for request, count in enumerate(news)]
        key = torch.cat([k for k, _ in new]).to(dtype)
        value = None if spec.mla is not None else torch.cat([v for _, v in new]).to(dtype)
    output = torch.full((count, spec.num_heads, spec.output_size), torch.nan, device=device, dtype=dtype)
    lse = torch.full(output.shape[:2], torch.nan, device=device) if spec.needs_lse else None
    common = _common(spec, shape, table, slots, device)
    # Backends copy a column in each call, and most models have none.
    tensors = with_own_memory(layer_tensors(spec, seed=_SEED, device=str(device)))
    quantized = declared(backend, "quantizes_queries")
    return StepInputs(spec, shape, common, query, key, value, caches, output, lse, tensors, keys, quantized)


def made_parts(
    backend: type[AttentionBackend], inputs: StepInputs, pages: Pages
) -> tuple[AttentionImpl[Any], AttentionMetadataBuilder[Any]]:
    """The impl and the builder of one layer, as an engine makes them."""
    spec, shape = inputs.spec, inputs.shape
    impl = backend.get_impl_cls().from_spec(
        spec,
        backend=backend,
        layer_name="layer",
        tensors=inputs.tensors,
        options=None if backend.Options is None else backend.Options(),
    )
    impl.process_weights_after_loading(getattr(torch, spec.dtype))
    layer: Any = types.SimpleNamespace(impl=impl)
    config = BuilderConfig(
        layers={"layer": layer},
        num_speculative_tokens=shape.query - 1 if shape.phase is Phase.DECODE else 0,
        max_num_seqs=shape.requests,
        max_num_batched_tokens=shape.tokens,
        max_model_len=max(shape.lengths),
        # Workspaces have room for the graphs that are captured.
        cudagraph_batch_sizes=(shape.requests,) if shape.phase is Phase.DECODE else (),
    )
    cache: Any = kv_cache_spec_for(spec, 1 if pages is None else pages[0])
    builder = backend.get_builder_cls()(cache, ["layer"], config, inputs.query.device)
    return impl, builder


def _random_table(lengths: tuple[int, ...], size: int) -> tuple[torch.Tensor, int]:
    """The blocks of each request in random order, int32 `[R, width]`, and the number of blocks with the null block."""
    counts = [-(-length // size) for length in lengths]
    order = (torch.randperm(sum(counts)) + 1).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, part in enumerate(torch.split(order, counts)):
        table[row, : len(part)] = part
    return table, sum(counts) + 1


def _slots(table: torch.Tensor, lengths: tuple[int, ...], news: tuple[int, ...], size: int) -> torch.Tensor:
    """The slots of the new tokens of each request, its last ones, int64."""
    found = []
    for row, length, new in zip(table.long(), lengths, news, strict=True):
        positions = torch.arange(length - new, length)
        found.append(row[positions // size] * size + positions % size)
    return torch.cat(found)


def _caches(
    backend: type[AttentionBackend],
    spec: LayerSpec,
    shape: StepShape,
    form: tuple[int, int, str],
    device: torch.device,
    earlier: SharedCaches,
    *,
    copies: bool,
) -> list[torch.Tensor]:
    """Copies of a cache of random numbers."""
    # There are enough copies that the L2 holds no number until it is read again.
    blocks, size, layout = form
    logical = backend.get_kv_cache_shape(
        blocks, size, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype, spec.head_size_v
    )
    order = answer(backend, "get_kv_cache_stride_order", layout=layout, spec=spec)
    stored = STORAGE_DTYPES[spec.resolved_kv_cache_dtype]
    physical = [logical[dim] for dim in order]

    def made() -> torch.Tensor:
        drawn = torch.randn(physical, device=device, dtype=STORAGE_DTYPES[spec.dtype]).to(stored)
        return drawn.permute([order.index(dim) for dim in range(len(order))])

    key = (*physical, *order, stored)
    if key in earlier:
        return earlier[key]
    first = made()
    if not copies:
        return [first]
    left = spec.window[0]
    steps = zip(shape.lengths, shape.query_lens, strict=True)
    seen = sum(n if left < 0 else min(n, left + new) for n, new in steps)
    read = max(1, first.nbytes * seen // max(sum(shape.lengths), 1))
    count = min(-(-least_bytes(device) // read), _MOST_COPIES)
    if device.type == "cuda":
        # Other candidates have caches of their own at the same time.
        free, _ = torch.cuda.mem_get_info(device)
        count = min(count, free // 8 // first.nbytes)
    earlier[key] = [first, *(made() for _ in range(count - 1))]
    return earlier[key]


def _common(
    spec: LayerSpec, shape: StepShape, table: torch.Tensor, slots: torch.Tensor, device: torch.device
) -> CommonAttentionMetadata:
    starts = torch.tensor(np.cumsum([0, *shape.query_lens]), dtype=torch.int32)
    host = np.asarray(shape.lengths, dtype=np.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        # The device tensor gets a copy, so that it and the host array share no memory.
        seq_lens=torch.from_numpy(host.copy()).to(device),
        num_reqs=shape.requests,
        num_actual_tokens=shape.tokens,
        max_query_len=max(shape.query_lens),
        max_seq_len=int(host.max()),
        block_table_tensor=table.to(device),
        slot_mapping=slots.to(device),
        causal=spec.causal,
        seq_lens_host=host,
    )


# The whole of a long prefill would take minutes.
_ROWS = 4
"""The first and the last rows of a request that are compared."""
_WITHOUT: dict[Feature, dict[str, Any]] = {
    Feature.SLIDING_WINDOW: {"window": (-1, -1)},
    Feature.CHUNKED_LOCAL: {"chunk_size": None},
    Feature.SOFT_CAP: {"logits_soft_cap": None},
    Feature.SINKS: {"has_sinks": False},
    Feature.ALIBI: {"has_alibi": False},
}
"""Layers without a feature, to recognise a backend that ignores it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong output: the difference, and the lower-case name of the feature at fault; "plain" without any."""

    text: str
    feature: str


def check_output(inputs: StepInputs) -> Wrong | None:
    """Compare sampled rows of `inputs.output` with the oracle; None if they agree within the tolerance."""
    for part in _parts(inputs):
        problem = part.problem(inputs.spec)
        if problem is not None:
            return _at_fault(part, inputs.spec, problem)
    return None


def _at_fault(part: _Part, spec: LayerSpec, problem: str) -> Wrong:
    asked = spec.required_features()
    for feature, changes in _WITHOUT.items():
        if feature in asked and part.problem(spec.replace(**changes)) is None:
            name = next(iter(feature.names()))
            return Wrong(f"{name} ignored: {problem}", name)
    return Wrong(problem, next(iter(asked.names()), "plain"))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some rows of a request, for some of the heads."""

    name: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    seq_len: int
    found: torch.Tensor
    tensors: LayerTensors
    quantized_queries: bool

    def problem(self, spec: LayerSpec) -> str | None:
        """The difference from the oracle of `spec`, or None."""
        tensors = dataclasses.replace(
            self.tensors,
            sinks=self.tensors.sinks if spec.has_sinks else None,
            alibi_slopes=self.tensors.alibi_slopes if spec.has_alibi else None,
        )
        few = spec.replace(num_heads=self.query.shape[1], num_kv_heads=self.key.shape[1], scale=spec.scale)
        expected: OracleResult = request_oracle(
            few, self.query, self.key.double(), self.value.double(), self.seq_len, tensors=tensors
        )
        bound = tolerance(few, expected.logit_size, quantized_queries=self.quantized_queries)
        try:
            assert_close(self.found, expected.output, bound.output, self.name, whole=bound.whole)
        except AssertionError as problem:
            return str(problem)
        return None


def _parts(inputs: StepInputs) -> Iterator[_Part]:
    spec, shape = inputs.spec, inputs.shape
    lengths = inputs.shape.lengths
    # In a mixed step, the last request that decodes and the first that prefills are among them.
    chosen = sorted({0, shape.decodes - 1, shape.decodes, shape.requests // 2, shape.requests - 1} - {-1})
    begins = [0, *itertools.accumulate(shape.query_lens)]
    kv_heads = sorted({0, spec.num_kv_heads - 1})
    group = spec.num_heads // spec.num_kv_heads
    # The first and the last query head of each KV head: a wrong mapping of heads is wrong in these too.
    heads = [head * group + each for head in kv_heads for each in sorted({0, group - 1})]
    given = {name: getattr(inputs.tensors, name) for name in ("sinks", "alibi_slopes", "w_uk", "w_uv")}
    few: dict[str, Any] = {name: each if each is None else each.cpu()[heads] for name, each in given.items()}
    tensors = dataclasses.replace(inputs.tensors, **few)
    for request in chosen:
        keys, values = inputs.keys(request)
        length, begin, new = lengths[request], begins[request], shape.query_lens[request]
        for first in sorted({0, max(new - _ROWS, 0)}):
            rows = min(_ROWS, new - first)
            end = length - new + first + rows
            # Without causality a query sees all keys, so only the last rows have none after them.
            if not spec.causal and end != length:
                continue
            span = slice(begin + first, begin + first + rows)
            yield _Part(
                f"output of request {request}, rows {first} to {first + rows - 1}",
                inputs.query[span][:, heads].cpu(),
                keys[:end, kv_heads].cpu(),
                values[:end, kv_heads].cpu(),
                end,
                inputs.output[span][:, heads],
                tensors,
                inputs.quantized_queries,
            )
