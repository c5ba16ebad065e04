"""The impl and the builder that serve one spec on one device, for callers without an engine around them.

The metadata of packed requests whose keys and values come with the call.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.impl import AttentionImpl, LayerTensors
from attnplug.core.interface.impl_and_builder import checked_metadata, make_builder, make_impl
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import PAD_SLOT_ID, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.integrations.ordering import build_in_order
from attnplug.registry.selection.decision import Decision


class EngineLayer:
    """The engine's layer as impls see it. All scales are 1: queries, keys and values are not quantised."""

    _q_scale_float = _k_scale_float = _v_scale_float = 1.0

    def __init__(self, impl: Any, device: torch.device) -> None:
        self.impl = impl
        self._q_scale = self._k_scale = self._v_scale = self._prob_scale = torch.ones((), device=device)


class GrowingBuilder:
    """A builder for layers of one decision that is made again for larger batches.

    Args:
        decision: the backend and the spec.
        layers: the layers by name, each with its `impl`.
        device: of the metadata.
        config: further settings; counts of requests and tokens are the first sizes.
    """

    def __init__(
        self, decision: Decision, layers: dict[str, EngineLayer], device: torch.device, **config: Any
    ) -> None:
        self.decision, self.device = decision, device
        self.config = BuilderConfig(layers=layers, **config)
        self._builder: AttentionMetadataBuilder[Any] | None = None

    def build(self, common: CommonAttentionMetadata) -> Any:
        """The backend's metadata for a step of any size, for `run_in_order`."""
        builder = self.fitting(common.num_reqs, common.num_actual_tokens)
        backend = self.decision.get_backend_cls()
        return build_in_order(
            lambda step: checked_metadata(backend, "build", builder.build(0, step)),
            common,
            builder.reorder_batch_threshold,
        )

    def fitting(self, reqs: int, tokens: int) -> AttentionMetadataBuilder[Any]:
        """The builder for steps of so many requests and tokens."""
        config, builder = self.config, self._builder
        if builder is None or reqs > config.max_num_seqs or tokens > config.max_num_batched_tokens:
            self.config = config = dataclasses.replace(
                config,
                # Powers of two, so that a batch that grows step by step makes few builders.
                max_num_seqs=max(config.max_num_seqs, _power_of_two(reqs)),
                max_num_batched_tokens=max(config.max_num_batched_tokens, _power_of_two(tokens)),
            )
            spec = self.decision.spec
            cache: Any = kv_cache_spec_for(spec, spec.block_size or 1)  # None with direct K and V
            backend = self.decision.get_backend_cls()
            builder = self._builder = make_builder(backend, cache, [*config.layers], config, self.device)
        return builder


class Binding:
    """The impl of a decision's backend, and a builder that grows with the batches.

    `learned` are the sinks and slopes of the first call, by their names in LayerTensors. The impl keeps copies, which
    `read` fills again at each call: no version counts writes through `tensor.data`.
    """

    def __init__(
        self,
        decision: Decision,
        name: str,
        device: torch.device,
        learned: dict[str, torch.Tensor | None],
    ) -> None:
        self.decision, self.name, self.device = decision, name, device
        self._learned = {}
        with torch.inference_mode(False):  # else no call outside of inference mode could write to them
            for field, given in learned.items():
                if given is not None:
                    self._learned[field] = torch.empty(given.numel(), dtype=torch.float32, device=device)
        self.read(learned)
        self.impl: AttentionImpl[Any] = make_impl(
            decision.get_backend_cls(),
            decision.spec,
            layer_name=name,
            tensors=LayerTensors(**self._learned),
            options=decision.get_options(),
        )
        self.impl.process_weights_after_loading(getattr(torch, decision.spec.dtype))
        self.layer = EngineLayer(self.impl, device)
        self._builder = GrowingBuilder(decision, {name: self.layer}, device)

    def read(self, learned: dict[str, torch.Tensor | None]) -> None:
        """Copy the caller's sinks and slopes, of as many elements as at first, into the impl's."""
        for field, own in self._learned.items():
            given = learned[field]
            if given is not None:
                own.copy_(given.detach().reshape(-1))

    def build(self, common: CommonAttentionMetadata) -> Any:
        """The backend's metadata for a step of any size, for `run_in_order`."""
        return self._builder.build(common)


def version_of(tensor: torch.Tensor | None) -> Any:
    """A value that changes when the tensor is replaced, moved or written to."""
    if tensor is None:
        return None
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.dtype,
        # Tensors of inference mode have no version, and torch raises an error for it.
        None if tensor.is_inference() else tensor._version,
    )


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


Ints: TypeAlias = npt.NDArray[np.signedinteger[Any]]


def starts_of(lengths: Ints) -> torch.Tensor:
    """Where requests of these lengths start in packed rows, int32 `[R + 1]` on the host."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return torch.from_numpy(starts)


def direct_step(
    query_lens: Ints,
    seq_lens: Ints,
    key_lens: Ints,
    causal: bool,
    device: torch.device,
    spans: npt.NDArray[np.int64] | None = None,
) -> CommonAttentionMetadata:
    """A step that writes no slot: each request has the last `key_lens` keys of its sequence of `seq_lens` tokens.

    Its queries are the last tokens of the sequence. `spans` are int64 `[T, 2]`, or any shape with as many numbers.
    """
    query_starts, key_starts = starts_of(query_lens), starts_of(key_lens)
    tokens, lens = int(query_starts[-1]), seq_lens.astype(np.int32)
    rows = None if spans is None else torch.from_numpy(spans.reshape(-1, 2).astype(np.int32))
    return CommonAttentionMetadata(
        query_start_loc=query_starts.to(device),
        query_start_loc_cpu=query_starts,
        seq_lens=torch.from_numpy(lens.copy()).to(device),
        num_reqs=len(query_lens),
        num_actual_tokens=tokens,
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
        block_table_tensor=torch.zeros(len(query_lens), 0, dtype=torch.int32, device=device),
        slot_mapping=torch.full((tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device),
        causal=causal,
        key_start_loc=key_starts.to(device),
        key_start_loc_cpu=key_starts,
        seq_lens_host=lens,
        mm_prefix_spans=None if rows is None else rows.to(device),
        mm_prefix_spans_cpu=rows,
    )
