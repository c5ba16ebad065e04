"""One step's batch, and the contract of the builders that turn it into a backend's metadata."""

from __future__ import annotations

import dataclasses
import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from typing_extensions import deprecated

from attnplug._system.one_commit import NotCopied
from attnplug.core.arguments import integer
from attnplug.core.errors import BatchError
from attnplug.core.interface.signatures import owner_of
from attnplug.core.selection import Selection
from attnplug.core.spec import AttentionType
from attnplug.core.step_inputs import StepInput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from attnplug.core.config import BuilderConfig
    from attnplug.core.kv_cache_spec import KVCacheSpec
    from attnplug.core.spec import LayerSpec

PAD_SLOT_ID = -1
"""The slot of a token whose K and V are not written."""


@dataclasses.dataclass
class CommonAttentionMetadata:
    """One step's batch of R requests and T tokens, shared by all layers.

    `query_start_loc` (int32 `[R + 1]`) and `seq_lens` (int32 `[R]`) are on the device, as are
    `block_table_tensor` (int32 `[R, max_blocks]`) and `slot_mapping` (int64 `[T]`);
    `query_start_loc_cpu` is the same on the host. Row j of a request with q new tokens and s tokens
    in all has position s - q + j.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    """Tokens of the batch; rows past it are neither read nor written."""
    max_query_len: int
    max_seq_len: int
    """The longest sequence, or an upper bound."""
    block_table_tensor: torch.Tensor
    # Slots are int64, because a slot of a large cache can exceed 32 bits.
    slot_mapping: torch.Tensor
    causal: bool | None = None
    """None: each layer is as its spec says, which a runtime fills in for each builder's layers.

    True narrows decoder layers whose queries see later tokens. False is for steps without causal layers.
    """
    is_cut: bool = False
    """Whether a request's tokens are partly in another micro-batch, so that only causal layers may attend."""

    logits_indices_padded: torch.Tensor | None = None
    num_logits_indices: int | None = None
    logits_indices_cpu: torch.Tensor | None = None
    """KV-sharing fast prefill: the same indices on the host, so that nothing waits for the device."""
    encoder_seq_lens: torch.Tensor | None = None
    encoder_seq_lens_cpu: npt.NDArray[np.int32] | None = None
    key_start_loc: torch.Tensor | None = None
    """Direct KV: where each request's keys start in the given key, int32 `[R + 1]`."""
    key_start_loc_cpu: torch.Tensor | None = None
    dcp_local_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens_cpu: torch.Tensor | None = None

    mm_prefix_spans: torch.Tensor | None = None
    """For layers with mm_prefix: the span of each token, int32 `[at least T, 2]` on the device.

    A row has the position of the span's first token, and one past that of its last; (0, 0) outside of spans. The
    token sees these keys too, also those that causality, window or chunk hides. Neither end decreases within a request,
    text aside. None means that nobody gave spans, which such layers refuse; a step of text has zeros.
    """
    mm_prefix_spans_cpu: torch.Tensor | None = None
    """The same on the host, so that nothing waits for the device."""

    selection: Selection | None = None
    """For layers with a SparseSpec: the keys that an indexer picks. Its values are read when a layer runs."""

    state_pages: torch.Tensor | None = None
    """For layers that keep a state: the page that each request starts from, int32 `[R]`; -1 starts from zeros.

    `slot_mapping[t]` is then the page that gets the state after token t, or -1.
    """
    state_pages_cpu: torch.Tensor | None = None
    state_slots_cpu: torch.Tensor | None = None
    """The slots of such a step on the host, so that nothing waits for the device."""

    seq_lens_host: npt.NDArray[np.int32] | None = None
    """Lengths on the host, given by the engine; never copied from the device."""
    seq_lens_host_exact: bool = True
    """Whether `seq_lens_host` is exact, not an upper bound."""

    _seq_lens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cpu: torch.Tensor | None = None
    # With init=False, dataclasses.replace does not copy a result that belongs to other lengths.
    _num_computed_tokens: torch.Tensor | None = dataclasses.field(default=None, init=False, repr=False)

    @property
    @deprecated("seq_lens_cpu can stall the device: give the batch seq_lens_host instead")
    def seq_lens_cpu(self) -> torch.Tensor:
        """The lengths on the host, copied from the device on first use."""
        if self._seq_lens_cpu is None:
            self._seq_lens_cpu = self.seq_lens.to("cpu")
        return self._seq_lens_cpu

    @property
    @deprecated("num_computed_tokens_cpu can stall the device: give the batch seq_lens_host instead")
    def num_computed_tokens_cpu(self) -> torch.Tensor:
        """Tokens with K and V already cached, per request, on the host."""
        if self._num_computed_tokens_cpu is None:
            # The property seq_lens_cpu is not used here, because it would warn a second time.
            lengths = self._seq_lens_cpu
            if lengths is None:
                lengths = self._seq_lens_cpu = self.seq_lens.to("cpu")
            self._num_computed_tokens_cpu = lengths - self.query_start_loc_cpu.diff()
        return self._num_computed_tokens_cpu

    def compute_num_computed_tokens(self) -> torch.Tensor:
        """Tokens with K and V already cached, int32 `[R]` on the device; computed once."""
        if self._num_computed_tokens is None:
            self._num_computed_tokens = self.seq_lens - self.query_start_loc.diff()
        return self._num_computed_tokens

    def causal_for(self, spec: LayerSpec) -> bool:
        """Whether a layer is causal in this step; see `LayerSpec.causal_in`.

        Raises:
            BatchError: see there; or the layer sees later tokens, and a micro-batch has a part of a request only.
        """
        causal = spec.causal_in(self.causal)
        if self.is_cut and not causal and spec.attn_type is not AttentionType.ENCODER_DECODER:
            limit = "has a part of a request, and a layer with causal=False sees its later tokens"
            raise BatchError("is_cut", True, limit, "cut micro-batches between requests")
        if self.is_cut and spec.direct_kv and self.key_start_loc is None:
            limit = "has a part of a request, whose keys do not start where its queries do"
            raise BatchError(
                "is_cut", True, limit, "give key_start_loc, or cut micro-batches between requests"
            )
        return causal

    def for_layers(self, specs: Iterable[LayerSpec]) -> CommonAttentionMetadata:
        """The batch for one builder: `causal` is as its layers have it. A copy, if that changes anything.

        Layers of both kinds leave None.

        Raises:
            BatchError: see `causal_for`.
        """
        found = {self.causal_for(spec) for spec in specs}
        causal = found.pop() if len(found) == 1 else self.causal
        return self if causal is self.causal else self.changed(causal=causal)

    def changed(self, **fields: Any) -> Self:
        """A copy with other values of these fields; unlike `dataclasses.replace` it checks no name, and keeps caches."""
        # A fifth of the time of copy.copy: a step makes one for each group of layers.
        common = object.__new__(type(self))
        vars(common).update(vars(self), **fields)
        return common

    def host_mm_prefix_spans(self) -> torch.Tensor | None:
        """The spans on the host, int32 `[at least T, 2]`; None if only the device has them, or nobody."""
        if self.mm_prefix_spans_cpu is not None:
            return self.mm_prefix_spans_cpu
        spans = self.mm_prefix_spans
        return spans if spans is not None and spans.device.type == "cpu" else None

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> CommonAttentionMetadata:
        """A view of the first requests and tokens, without graph padding; no tensor is copied.

        Raises:
            BatchError: more tokens or requests than the batch has.
        """
        for name, value, limit in (
            # The batch may be padded past its own num_actual_tokens; slot_mapping has a row for every token.
            ("num_actual_tokens", num_actual_tokens, self.slot_mapping.shape[0]),
            ("num_actual_reqs", num_actual_reqs, self.num_reqs),
        ):
            if not 0 <= integer(name, value) <= limit:
                raise BatchError(name, value, f"must be in 0 .. {limit}, the size of the batch")
        cut: dict[str, Any] = {"num_reqs": num_actual_reqs, "num_actual_tokens": num_actual_tokens}
        for name, per in _ROWS.items():
            end = {"request": num_actual_reqs, "start": num_actual_reqs + 1}.get(per, num_actual_tokens)
            value = getattr(self, name)
            cut[name] = None if value is None else value[:end]
        return dataclasses.replace(self, **cut)


STEP_INPUTS = (
    StepInput(
        *("encoder_seq_lens", "request", "encoder_seq_lens_cpu"),
        is_array=True,
        padding=1,
        needed_by=lambda spec: spec.attn_type is AttentionType.ENCODER_DECODER,
    ),
    StepInput("dcp_local_seq_lens", "request", "dcp_local_seq_lens_cpu", width=None, of_keys=True),
    StepInput("key_start_loc", "start", "key_start_loc_cpu", of_keys=True),
    StepInput(
        *("mm_prefix_spans", "token", "mm_prefix_spans_cpu"),
        width=(2,),
        of_keys=True,
        needed_by=lambda spec: spec.mm_prefix,
        why="has mm_prefix",
        remedy="give int32 [T, 2], zeros for text; the runtime's step_batch_builder() fills them",
    ),
    StepInput(
        *("selection", "token"),
        needed_by=lambda spec: spec.sparse is not None,
        why="is sparse {spec.sparse}",
        remedy="use the selection of the runtime's step_batch_builder(), or Selection.allocate",
    ),
    StepInput(
        *("state_pages", "request", "state_pages_cpu"),
        padding=PAD_SLOT_ID,
        needed_by=lambda spec: spec.state is not None,
        why="keeps a state",
        remedy="begin the step with states, from the runtime's state_table()",
    ),
    StepInput("logits_indices_padded", "logit", "logits_indices_cpu"),
)
"""The optional inputs of a step. A new one is a row here and a field above, which the makers of steps fill."""

OPTIONAL_ROWS = {
    name: each.per for each in STEP_INPUTS if each.per in ("request", "token") for name in each.fields
}
"""The optional fields with a row for each request or token, and which of both."""
LENGTHS_ON_HOST = dict.fromkeys(("seq_lens_host", "_seq_lens_cpu", "_num_computed_tokens_cpu"), "request")
WITHOUT_LOGITS: Mapping[str, Any] = dict.fromkeys(
    ("logits_indices_padded", "num_logits_indices", "logits_indices_cpu")
)
"""The changes of a step that make it want the outputs of all tokens."""
_ROWS = {
    **dict.fromkeys(
        ("query_start_loc", "query_start_loc_cpu", "key_start_loc", "key_start_loc_cpu"), "start"
    ),
    **dict.fromkeys(("seq_lens", "block_table_tensor"), "request"),
    **dict.fromkeys(("slot_mapping", "state_slots_cpu"), "token"),
    **(LENGTHS_ON_HOST | OPTIONAL_ROWS),
}


class AttentionMetadata:
    """A step's metadata from a backend's builder for its impl; `slot_mapping` has the slots of new K and V."""

    slot_mapping: torch.Tensor


class AttentionCGSupport(enum.IntEnum):
    """The batches that a backend can run in a CUDA graph; higher includes lower."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Decodes of one token each."""
    UNIFORM_BATCH = 2
    """Decodes of one common length, as in speculative verification."""
    ALWAYS = 3
    """Any batch."""


_M = TypeVar("_M", bound=AttentionMetadata)
_Builder = TypeVar("_Builder", bound="AttentionMetadataBuilder[Any]")


class AttentionMetadataBuilder(NotCopied, ABC, Generic[_M]):
    """Turns a step's batch into one backend's metadata, once per step and group of layers.

    It may hold views of its own buffers, so it cannot be copied or pickled.

    Args:
        kv_cache_spec: the cache of the layers served.
        layer_names: their names.
        config: the engine's settings.
        device: of the metadata.
    """

    reorder_batch_threshold: int | None = None
    """Query length up to which a request is a decode and goes to the front; None: no reordering."""
    supports_update_block_table: ClassVar[bool] = False
    """Whether `update_block_table` can replace a second build."""
    needs_host_seq_lens: ClassVar[Literal["none", "upper_bound", "exact"]] = "none"
    """The form of `CommonAttentionMetadata.seq_lens_host` that `build` needs."""
    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    """The batches that may be captured; vLLM's name `_cudagraph_support` is read too."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Read `_cudagraph_support` where the class or a mixin of it sets that name."""
        super().__init_subclass__(**keywords)
        ported, own = owner_of(cls, "_cudagraph_support"), owner_of(cls, "cudagraph_support")
        # The nearer of the two decides, as for any inherited attribute.
        if ported is not None and (own is None or cls.__mro__.index(ported) < cls.__mro__.index(own)):
            cls.cudagraph_support = vars(ported)["_cudagraph_support"]

    # Type checkers would take any attribute for known if they saw this method.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            remedy = "; read self.config, which is a BuilderConfig" if name == "vllm_config" else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{remedy}"
            raise AttributeError(text, name=name, obj=self)

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: Sequence[str],
        config: BuilderConfig,
        device: torch.device,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = list(layer_names)
        self.config = config
        self.device = device

    @property
    def build_key(self) -> Hashable:
        """The facts of the layers that decide what `build` makes of a batch, apart from its table and slots.

        In a step the runtime builds once for all groups of one backend with equal keys. The others get copies by
        `update_block_table`, such as a group of full attention those of a group with windows. None: only groups of
        the same specs share a build. A subclass that overrides how metadata is made declares its own key.
        """
        return None

    def for_own_layers(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """`common.for_layers` with the specs of this builder's own layers, those whose impls `config.layers` has.

        A runtime has done so already. An engine that calls `build` itself may leave `causal=None`.
        """
        return common.for_layers(self._specs)

    def check_cut(self, common: CommonAttentionMetadata) -> None:
        """BatchError for a part of a request, if a layer of this builder sees later tokens."""
        if common.is_cut:
            self.for_own_layers(common)

    @functools.cached_property
    def reads_pages(self) -> bool:
        """Whether the layers have their keys in pages, as far as `config.layers` says.

        Others get them with the call, as do those of an encoder, which may have no cache.
        """
        return not any(spec.direct_kv or spec.is_encoder for spec in self._specs)

    @functools.cached_property
    def _specs(self) -> frozenset[LayerSpec]:
        impls = (getattr(self.config.layers.get(name), "impl", None) for name in self.layer_names)
        specs = (getattr(impl, "spec", None) for impl in impls)
        return frozenset(spec for spec in specs if spec is not None)

    @classmethod
    def get_cudagraph_support(cls, config: BuilderConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """The batches that may be captured under this configuration."""
        return cls.cudagraph_support

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        """Set `reorder_batch_threshold`, raised to cover speculative decodes where they are decodes.

        Under decode context parallelism it is 1, even where None was given, unless varlen decodes are supported.
        """
        threshold = reorder_batch_threshold
        if threshold is not None and supports_spec_as_decode:
            threshold = max(threshold, 1 + self.config.num_speculative_tokens)
        if self.config.decode_context_parallel_size > 1 and not supports_dcp_with_varlen:
            threshold = 1
        self.reorder_batch_threshold = threshold

    @abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> _M:
        """The metadata of one step.

        Args:
            common_prefix_len: computed tokens of the leading blocks that all requests share, which each query sees
                whole. A builder may attend them once for all requests or ignore them; the numbers are the same.
            common_attn_metadata: the batch.
            fast_build: prefer cheap building over fast running.
        """

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> _M:
        """The metadata of a step to capture in a CUDA graph."""
        return self.build(0, common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> _M:
        """The metadata of draft step `draft_index` in speculative decoding."""
        return self.build(0, common_attn_metadata, fast_build=True)

    def update_block_table(self, metadata: _M, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> _M:
        """`metadata` for another KV group of the same batch: a new table and slots, no rebuild.

        Raises:
            TypeError: the builder does not set `supports_update_block_table`.
        """
        raise TypeError(
            f"{type(self).__name__} cannot swap block tables: supports_update_block_table is False"
        )

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: npt.NDArray[np.int32],
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Whether `build` shall get the prefix that all requests share, to attend it once.

        The runtime asks in each step with such a prefix, except for graphs. It answers for this step only.

        Args:
            common_prefix_len: tokens of the shared blocks; all are computed, and each query sees all of them.
            query_lens: new tokens of each request, `[R]`.
            num_query_heads: query heads of a layer.
            num_kv_heads: KV heads of a layer.
            use_alibi: whether a layer has ALiBi.
            use_sliding_window: whether a layer has a window; it hides no key in this step.
            use_local_attention: whether a layer has chunks; all sequences of this step are within one.
            num_sms: multiprocessors of the GPU; on a CPU, the threads of torch.
            dcp_world_size: ranks that share the KV of a request.
        """
        return False


_MAKERS = "build", "build_for_drafting", "build_for_cudagraph_capture", "update_block_table"


def own_build_key(builder: AttentionMetadataBuilder[Any]) -> Hashable:
    """The builder's `build_key`; None if a subclass overrides how metadata is made and declares no key of its own."""
    return builder.build_key if _has_own_build_key(type(builder)) else None


# Cached, because each step asks it of each group.
@functools.cache
def _has_own_build_key(builder: type[AttentionMetadataBuilder[Any]]) -> bool:
    order = builder.__mro__
    declared = [order.index(owner_of(builder, name) or object) for name in ("build_key", *_MAKERS)]
    return declared[0] <= min(declared[1:])
