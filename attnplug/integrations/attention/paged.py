"""transformers' continuous batching, `generate_batch`.

Models keep their implementation and get block tables; a step is metadata with lengths on the host, tables and slots.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching import PagedAttentionCache, continuous_api, initialization

from attnplug.core.errors import BatchError
from attnplug.core.interface.answers import answer
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.precision import without_autocast
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.integrations.attention.calls import AttentionCall
from attnplug.integrations.attention.model_hooks import NAME, LayerState, forward_pass
from attnplug.integrations.attention.paged_cache import LayerCache, join_keys_and_values, layer_cache
from attnplug.integrations.attention.step_mask import PatternMask, StepMask
from attnplug.integrations.binding import direct_step
from attnplug.integrations.flash_attn.pages import Pages
from attnplug.integrations.flash_attn.steps import Ints, Lengths, lengths_of, paged_step
from attnplug.integrations.ordering import run_in_order


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """The requests of a step for one kind of layer, without those that only pad a batch.

    `query_lens` are their new tokens, `key_lens` all tokens that the layer reads, the new ones too.
    """

    arguments: Mapping[str, Any]
    query_lens: Ints
    key_lens: Ints

    @classmethod
    def read(cls, arguments: Mapping[str, Any], kind: str, rows: int) -> PagedStep:
        """The step of these keywords; the host copies the lengths, which waits for a GPU.

        BatchError: lengths that do not fit the `rows` tokens of the call.
        """
        starts = arguments["cu_seq_lens_k"]
        starts = starts[kind] if isinstance(starts, Mapping) else starts
        query_lens = lengths_of("cu_seq_lens_q", arguments["cu_seq_lens_q"].int(), rows)
        key_lens = lengths_of("cu_seq_lens_k", starts.int(), None)
        if query_lens.size != key_lens.size or (key_lens < query_lens).any():
            raise BatchError("cu_seq_lens_k", key_lens.tolist(), f"must be at least {query_lens.tolist()}")
        # Requests without tokens at the end fill a batch of a fixed size. Others wait to be forked, and their keys count.
        real = int(np.flatnonzero(query_lens).max(initial=-1)) + 1
        return cls(arguments, query_lens[:real], key_lens[:real])

    @property
    def tokens(self) -> int:
        """The new tokens of all requests."""
        return int(self.query_lens.sum())

    def gathered(self, device: torch.device) -> CommonAttentionMetadata:
        """The step of a layer whose keys the cache gathers into one packed tensor."""
        return direct_step(self.query_lens, self.key_lens, self.key_lens, True, device)

    def paged(self, part: LayerCache, pages: Pages, needs: str) -> CommonAttentionMetadata:
        """The step of a layer that reads pages; `needs` is what the builder needs of the lengths on the host."""
        device = pages.keys.device
        table = self._table(part.group, pages.block_size) // part.step
        lengths = Lengths.of(self.key_lens, device)
        given = self.arguments["block_table"]
        if given is None:
            places = self.arguments["write_index"][part.group][: self.tokens]
            size = pages.block_size
            slots = places if part.step == 1 else places // (size * part.step) * size + places % size
        else:
            last = (lengths.tensor - 1).long()
            block = table.long().gather(1, (last // pages.block_size)[:, None])[:, 0]
            slots = block * pages.block_size + last % pages.block_size
        common = paged_step(
            self.query_lens, lengths, dataclasses.replace(pages, table=table), causal=True, needs=needs
        )
        return dataclasses.replace(common, slot_mapping=slots)

    def _table(self, group: int, block_size: int) -> torch.Tensor:
        """The pages of each request, int32 `[R, max_blocks]`."""
        given = self.arguments["block_table"]
        if given is not None:
            if (self.query_lens > 1).any():
                limit = "new tokens in a request: block tables are for steps of one token each"
                raise BatchError("block_table", int(self.query_lens.max()), limit)
            rows: torch.Tensor = given[group][: self.query_lens.size].contiguous()
            return rows
        # Indices name the place of each token. Where all tokens are new, transformers gives those to write only.
        indices: torch.Tensor = self.arguments["read_index"][group]
        if not indices.numel():
            indices = self.arguments["write_index"][group]
        ends = np.cumsum(self.key_lens)
        most = -(-int(self.key_lens.max()) // block_size)
        first = (ends - self.key_lens)[:, None] + np.arange(most) * block_size
        # Entries past a request's pages are never followed, and must only be in the tensor.
        first = np.minimum(first, ends[:, None] - 1)
        places = torch.from_numpy(first).to(indices.device)
        return (indices[places] // block_size).int()


_ARGUMENTS = (
    *("cache", "cu_seq_lens_q", "cu_seq_lens_k", "block_table", "read_index", "write_index"),
    # The names of the longest lengths differ by version. Attention functions never read the last two.
    *("max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k"),
    *("logits_indices", "logits_processor_args"),
)
_GRAPHS = "pass ContinuousBatchingConfig(use_cuda_graph=False)"


def take_paged(keywords: dict[str, Any], layer: str) -> dict[str, Any] | None:
    """The keywords of continuous batching, taken out of `keywords`; None for an ordinary call.

    BatchError: the forward has a paged cache, and the model did not pass it on to `layer`.
    """
    if not isinstance(keywords.get("cache"), PagedAttentionCache):
        if isinstance(forward_pass.cache, PagedAttentionCache):
            limit = f"of continuous batching does not reach {layer}: its model drops the keyword"
            raise BatchError("cache", type(forward_pass.cache).__name__, limit, "use generate")
        return None
    return {name: keywords.pop(name, None) for name in _ARGUMENTS}


def attend_paged(
    call: AttentionCall, arguments: dict[str, Any], mask: Any, scaling: float | None, layer: LayerState
) -> torch.Tensor:
    """Attention of the step's packed tokens: `[1, T, H, D]`, with zeros for rows that no request has.

    Raises:
        BatchError: a mask or a step that is not served.
        NoBackendError: no backend serves the layer.
    """
    # A layer that keeps all tokens reads their pages. A layer with a window
    # keeps a ring of tokens, which transformers gathers in their order.
    query, device = call.query, call.query.device
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        limit = f"cannot be served in {call.layer}: lengths are read on the host in each step"
        raise BatchError("use_cuda_graph", True, limit, _GRAPHS)
    part = layer_cache(arguments["cache"], getattr(call.module, "layer_idx", -1))
    mask_step = _mask_step(call, mask)
    step: PagedStep = _once(
        mask_step, ("step", part.kind), lambda: PagedStep.read(arguments, part.kind, query.shape[2])
    )
    # Each layer has one place in the cache for a token, so a second call would overwrite what the first one wrote.
    written = "written", part.layer
    if written in mask_step.metadata:
        limit = f"must be 1 in a step: the paged cache keeps one set of keys and values for {call.layer}"
        raise BatchError("calls of attention", 2, limit, "use generate")
    mask_step.metadata[written] = True
    output = query.new_zeros(query.shape[2], query.shape[1], call.value.shape[3])
    if not step.tokens:
        return output[None]
    pages = None if part.window is not None else part.pages()
    spec = _spec(call, mask_step, part, scaling, None if pages is None else pages.block_size)
    binding = layer.binding(spec, device, call.keywords.sinks, int(step.query_lens.max()))
    backend = binding.decision.get_backend_cls()
    rows = (tensor.squeeze(0).transpose(0, 1)[: step.tokens] for tensor in (query, call.key, call.value))
    packed, key, value = (tensor.contiguous() for tensor in rows)
    kind = (backend, binding.decision.spec, binding.decision.options, device)
    if pages is None:
        common = step.gathered
        metadata = _once(mask_step, ("gathered", *kind), lambda: binding.build(common(device)))
        key, value = part.update(call.key, call.value, arguments)
        total = int(step.key_lens.sum())
        key, value, cache = key[:total].contiguous(), value[:total].contiguous(), None
    else:
        if "NHD" not in answer(backend, "supported_kv_cache_layouts"):
            limit = f"cannot be read by {backend.get_name()}, and the pages of transformers have it"
            raise BatchError("layout", "NHD", limit, "choose another backend by attnplug.use(...)")
        needs = backend.get_builder_cls().needs_host_seq_lens
        found = pages
        metadata = _once(
            mask_step, ("paged", part.group, *kind), lambda: binding.build(step.paged(part, found, needs))
        )
        cache = pages.as_one()
    with without_autocast(device):
        real = output[: step.tokens]
        run_in_order(binding.impl.forward, binding.layer, packed, key, value, cache, metadata, real)
    return output[None]


def _mask_step(call: AttentionCall, mask: Any) -> StepMask:
    """The step's mask, whose pattern is that of the layer in its model."""
    if not isinstance(mask, PatternMask):
        limit = f"of {call.layer} was not made by transformers' mask functions, so its window is not known"
        raise BatchError("attention_mask", type(mask).__name__, limit)
    if isinstance(mask.step, str):
        limit = f"cannot be served in {call.layer}: {mask.step}"
        raise BatchError("attention_mask", tuple(mask.shape), limit)
    if not mask.step.pattern.causal or mask.step.pattern.blockwise:
        limit = f"in {call.layer} shows later tokens, which continuous batching has not computed"
        raise BatchError("attention_mask", "not causal", limit, "use generate")
    return mask.step


def _spec(
    call: AttentionCall, step: StepMask, part: LayerCache, scaling: float | None, block_size: int | None
) -> LayerSpec:
    """The requirements of the layer.

    BatchError: the cache has dropped keys that the layer sees, or its heads are others.
    """
    pattern, query = step.pattern, call.query.shape
    if part.window is not None and not (0 <= pattern.window[0] < part.window and pattern.chunk_size is None):
        seen = "all tokens" if pattern.window[0] < 0 else f"{pattern.window[0] + 1} tokens"
        seen = f"chunks of {pattern.chunk_size} tokens" if pattern.chunk_size else seen
        limit = f"is all that the cache keeps for {call.layer}, which sees {seen}"
        raise BatchError("sliding_window", part.window, limit, "correct layer_types in the configuration")
    if call.key.shape[3] != call.value.shape[3]:
        sizes = f"{call.key.shape[3]} and {call.value.shape[3]}"
        limit = f"differ in {call.layer}: transformers' paged cache has one size for keys and values"
        raise BatchError("head_size, head_size_v", sizes, limit)
    return LayerSpec(
        num_heads=query[1],
        num_kv_heads=call.key.shape[1],
        head_size=query[3],
        dtype=call.query.dtype,
        attn_type=AttentionType.DECODER,
        scale=None if scaling is None else float(scaling),
        window=pattern.window,
        chunk_size=pattern.chunk_size,
        logits_soft_cap=call.keywords.softcap,
        has_sinks=call.keywords.sinks is not None,
        direct_kv=block_size is None,
        block_size=block_size,
    )


def _once(step: StepMask, key: Hashable, make: Any) -> Any:
    """`make()`, once for all layers that share the mask of a step."""
    if key not in step.metadata:
        step.metadata[key] = make()
    return step.metadata[key]


_ORIGINAL = "_attnplug_original"


def serve_continuous_batching() -> None:
    """Let `generate_batch` run models with `attn_implementation="attnplug"`; may be called again."""
    # Up to 5.18 transformers would look for "paged|attnplug", and later it accepts
    # a fixed list of names. Both are decided in one method, which has nothing to
    # do for attnplug: its function serves ordinary calls and paged ones.
    _wrap(continuous_api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _keep)
    _wrap(continuous_api.ContinuousBatchingManager, "start", _start)
    _wrap(PagedAttentionCache, "__init__", _make_cache)
    # A private function, seen in 5.17 and 5.23; without it decodes have no block tables, only an index for each token.
    if hasattr(initialization, "ensure_decode_fast_path_is_available"):
        _wrap(initialization, "ensure_decode_fast_path_is_available", _allow_block_tables)


def _wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(call, _ORIGINAL, original)
    setattr(owner, name, call)


def _keep(original: Callable[..., Any], manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """In place of a switch to another implementation."""
    # It keeps attnplug also where attnplug serves the text part alone.
    if NAME not in (model.config._attn_implementation, model.config.get_text_config()._attn_implementation):
        original(manager, model, *args, **kwargs)


def _start(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> None:
    """Start the thread of a manager in a copy of the caller's context, with what `attnplug.use` has set there."""
    loop = type(manager)._run_generation_loop.__get__(manager)
    manager._run_generation_loop = functools.partial(contextvars.copy_context().run, loop)
    original(manager, *args, **kwargs)


def _make_cache(original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> None:
    """Make the cache, with keys and values that backends can read as one."""
    original(cache, *args, **kwargs)
    if cache.config._attn_implementation == NAME:
        join_keys_and_values(cache)


def _allow_block_tables(
    original: Callable[..., Any], config: Any, cb_config: Any, *args: Any, **kw: Any
) -> None:
    """Leave block tables on for attnplug, but for models with windows."""
    # The rings of windows have no tables.
    if config._attn_implementation != NAME:
        original(config, cb_config, *args, **kw)
        return
    kinds = getattr(config, "layer_types", None) or ()
    if any(kind != "full_attention" for kind in kinds) or (
        not kinds and getattr(config, "sliding_window", None) is not None
    ):
        cb_config.max_blocks_per_request = 0
