"""The contract of an impl, which runs one layer: it writes the KV cache and attends."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import torch

from attnplug.core.backend import AttentionBackend, backend_of
from attnplug.core.checks import check_positive
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError, PluginError, SpecError
from attnplug.core.interface.interface import constructor_faults, impl_faults, in_lines
from attnplug.core.interface.ported_names import IMPL_INSTANCE_NAMES
from attnplug.core.kv_format import kv_format
from attnplug.core.metadata import AttentionMetadata
from attnplug.core.mla.weights import LatentProjection, check_projection
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.core.state.weights import check_convolution

_M = TypeVar("_M", bound=AttentionMetadata)

Scale: TypeAlias = float | tuple[float, ...]
"""A scale on the host: a number, or with `head_scales` one for each KV head."""


# A generated __eq__ would compare tensors, and a tensor of several elements has no truth value.
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """The learned or calibrated tensors of one layer. Each may be a part of a larger tensor, with an offset and strides.

    Args:
        sinks: float32 `[num_heads]`, in natural logit units.
        alibi_slopes: float32 `[num_heads]`.
        k_scale: stored key x k_scale = key; a one-element tensor or a float, fixed at load. With `head_scales` float32
            `[num_kv_heads]` or as many floats, or one for all heads. The scales of the engine's layer, if `attend` is
            given one, count instead.
        v_scale: the same for values; with latents `k_scale` is for all elements.
        w_uk: W_UK of a layer with `mla`, of its dtype, `[num_heads, nope, kv_lora_rank]`.
        w_uv: its W_UV, `[num_heads, kv_lora_rank, v_head_dim]`.
        kv_b_proj: both as the model's weight `[num_heads * (nope + v_head_dim), kv_lora_rank]`, or the products with
            them as a LatentProjection, such as for a weight that the model quantises.
        conv_weight: of a convolution, `[C, width]`; the last column is for the token itself.
        conv_bias: of a convolution, `[C]`, or None.
    """

    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    # Any stands for a float or a tuple of floats: impls of layers without `head_scales` call `float(k_scale)`.
    k_scale: torch.Tensor | Any = 1.0
    v_scale: torch.Tensor | Any = 1.0
    w_uk: torch.Tensor | None = None
    w_uv: torch.Tensor | None = None
    kv_b_proj: torch.Tensor | LatentProjection | None = None
    conv_weight: torch.Tensor | None = None
    conv_bias: torch.Tensor | None = None

    def check(self, spec: LayerSpec) -> None:
        """SpecError unless these are exactly the tensors that `spec` requires, in their shapes.

        It does not read a scale in a tensor, which may be on a device.
        """
        if not isinstance(spec, LayerSpec):
            raise SpecError("spec", spec, "must be a LayerSpec")
        for field, flag in (("sinks", "has_sinks"), ("alibi_slopes", "has_alibi")):
            tensor, asked = getattr(self, field), getattr(spec, flag)
            if asked and tensor is None:
                raise SpecError(field, None, f"is required: the spec says {flag}=True")
            if tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.layout != torch.strided:
                raise SpecError(field, tensor, f"must be a float32 tensor of {spec.num_heads} elements")
            if tensor.is_meta:
                raise SpecError(f"{field}.device", "meta", "has no values")
            if not asked:
                raise SpecError(field, tuple(tensor.shape), f"was given but the spec says {flag}=False")
            if tensor.dtype != torch.float32 or tensor.shape != (spec.num_heads,):
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise SpecError(field, found, f"must be torch.float32 ({spec.num_heads},)")
        for field, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            _check_scale(field, scale, spec)
        check_projection(spec, self.w_uk, self.w_uv, self.kv_b_proj)
        check_convolution(spec, self.conv_weight, self.conv_bias)

    @property
    def has_projection(self) -> bool:
        """Whether the weights of latent attention are given."""
        return self.w_uk is not None or self.kv_b_proj is not None


def _check_scale(field: str, scale: object, spec: LayerSpec) -> None:
    if isinstance(scale, torch.Tensor):
        if scale.is_meta or scale.is_complex() or scale.dtype == torch.bool:
            found = f"{scale.dtype} on {scale.device}"
            raise SpecError(field, found, "must be a number: one element, with a value")
        if scale.numel() == 1 or (spec.head_scales and scale.shape == (spec.num_kv_heads,)):
            return
        raise SpecError(field, tuple(scale.shape), *_scale_limit(spec))
    if isinstance(scale, tuple):
        if not spec.head_scales or len(scale) != spec.num_kv_heads:
            raise SpecError(field, scale, *_scale_limit(spec))
        for head, each in enumerate(scale):
            check_positive(f"{field}[{head}]", each)
    elif check_positive(field, scale) != 1 and not kv_format(spec.resolved_kv_cache_dtype).layer_scales:
        limit = f"would be ignored: kv_cache_dtype={spec.kv_cache_dtype!r} stores values as they are"
        raise SpecError(field, scale, limit, "leave it at 1.0")


def _scale_limit(spec: LayerSpec) -> tuple[str, str | None]:
    if spec.head_scales:
        return f"must have the shape ({spec.num_kv_heads},), or one element for all heads", None
    remedy = "declare a layer whose KV heads have scales of their own with head_scales=True"
    return "must have one element: scales are per tensor", remedy


def host_scale(scale: Any, spec: LayerSpec) -> Scale:
    """A scale of `spec` that has passed `LayerTensors.check` as numbers; a tensor on a device makes the host wait."""
    if not spec.head_scales:
        return float(scale)
    values = scale.flatten().tolist() if isinstance(scale, torch.Tensor) else scale
    found = tuple(map(float, values)) if isinstance(values, list | tuple) else (float(values),)
    return found * spec.num_kv_heads if len(found) == 1 else found


@runtime_checkable
class AttentionLayer(Protocol):
    """An engine's layer, with scales for its impl as device tensors and host floats.

    With `head_scales` those of keys and values are float32 `[num_kv_heads]`, and on the host a tuple of floats. Where
    the host has something else, the tensors count.
    """

    impl: Any
    _q_scale: torch.Tensor
    _k_scale: torch.Tensor
    _v_scale: torch.Tensor
    _prob_scale: torch.Tensor
    _q_scale_float: float
    # A float, or a tuple of floats: types of engines have one of them.
    _k_scale_float: Any
    _v_scale_float: Any


class AttentionImpl(ABC, Generic[_M]):
    """Runs one layer on one backend; the framework makes it by `from_spec`.

    The constructor has vLLM's arguments, so that vLLM's impls can be ported. Before it runs, `from_spec` sets
    `self.backend`, `self.spec` and `self.tensors`, which have the rest: chunks, sinks, two-sided windows, value head
    sizes. `self.num_heads` and the like are those of the spec.
    """

    can_return_lse_for_decode: ClassVar[bool] = False
    """Whether decodes can write `output_lse`, as context parallelism needs."""
    supports_pcp: ClassVar[bool] = False
    """Whether prefill context parallelism is supported."""
    supports_quant_query_input: ClassVar[bool] = False
    """Whether queries may come quantised, with the layer's q scale."""

    num_heads: int
    """This and the next four are values of the spec. vLLM's impls have all five."""
    num_kv_heads: int
    head_size: int
    scale: float
    kv_cache_dtype: str

    need_to_return_lse_for_decode: bool = False
    """Whether this process must write it: it can, and shares requests' KV with other ranks."""
    dcp_world_size: int
    """Ranks of decode context parallelism: those of the `dcp` given to `from_spec`, else 1."""
    dcp_rank: int
    pcp_world_size: int
    """Ranks of prefill context parallelism: those of the `pcp` given to `from_spec`, else 1."""
    pcp_rank: int
    total_cp_world_size: int
    """The ranks of both together; `total_cp_rank` counts those of decode context parallelism first."""
    total_cp_rank: int

    backend: type[AttentionBackend] = AttentionBackend  # type: ignore[type-abstract]
    """The backend given to `from_spec`; the constructor alone leaves the contract's defaults."""
    spec: LayerSpec
    tensors: LayerTensors
    layer_name: str
    options: Any
    kv_sharing_target_layer_name: str | None

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Let callers give `backend` to a `from_spec` of its own that was written before there was one."""
        super().__init_subclass__(**keywords)
        own = cls.__dict__.get("from_spec")
        if isinstance(own, classmethod):
            parameters = inspect.signature(cls.from_spec).parameters
            if "backend" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
                cls.from_spec = _taking_backend(own)  # type: ignore[method-assign, assignment]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """One rank without context parallelism; set here because a subclass may not call the base constructor."""
        self = super().__new__(cls)
        self._set_ranks(ContextParallel(), ContextParallel())
        return self

    def _set_ranks(self, dcp: ContextParallel, pcp: ContextParallel) -> None:
        """SpecError if the class cannot work in such groups."""
        for field, group in (("dcp", dcp), ("pcp", pcp)):
            flag = "can_return_lse_for_decode" if field == "dcp" else "supports_pcp"
            if group.size > 1 and not getattr(self, flag):
                limit = f"is not served by {type(self).__name__}, which does not set {flag}"
                raise SpecError(field, group, limit)
        self.dcp_rank, self.dcp_world_size = dcp.rank, dcp.size
        self.pcp_rank, self.pcp_world_size = pcp.rank, pcp.size
        self.total_cp_world_size = pcp.size * dcp.size
        self.total_cp_rank = pcp.rank * dcp.size + dcp.rank
        self.need_to_return_lse_for_decode = dcp.size > 1

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        if hasattr(self, "spec"):
            return  # from_spec has set the whole spec
        spec = LayerSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_size=head_size,
            scale=scale,
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            has_alibi=alibi_slopes is not None,
        )
        tensors = LayerTensors()
        if alibi_slopes is not None:
            slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
            tensors = LayerTensors(alibi_slopes=slopes)
        tensors.check(spec)
        self._bind(spec, "", tensors, kv_sharing_target_layer_name)

    @classmethod
    def from_spec(
        cls,
        spec: LayerSpec,
        *,
        backend: type[AttentionBackend] | None = None,
        layer_name: str,
        tensors: LayerTensors | None = None,
        kv_sharing_target_layer_name: str | None = None,
        options: Any = None,
        dcp: ContextParallel | None = None,
        pcp: ContextParallel | None = None,
    ) -> Self:
        """The impl of one layer.

        Args:
            spec: what the layer needs; the backend has accepted it.
            backend: the class whose `get_impl_cls` gave this impl; None for the one backend of its package that gives it.
            layer_name: its name, as in the plan.
            tensors: sinks, slopes and scales; all that the spec requires.
            kv_sharing_target_layer_name: the layer whose KV cache this one reads, writing none.
            options: the backend's Options.
            dcp: the group of decode context parallelism; None without. The impl computes partial results with
                LSE, and the caller merges those of all ranks.
            pcp: the group of prefill context parallelism; None without.

        Raises:
            PluginError: the class does not follow the interface, or its backend is not given and cannot be known;
                the error says what to write.
            SpecError: a tensor missing, not asked for, or of another shape; a group that the impl cannot serve.
        """
        backend = backend_of(cls) if backend is None else backend
        where = f"{backend.get_name() or backend.__name__} cannot run layer {layer_name}"
        if faults := impl_faults(cls, AttentionImpl):
            raise PluginError(f"{where}:{in_lines(faults)}")
        tensors = tensors or LayerTensors()
        tensors.check(spec)
        # Ported constructors take sinks among their own arguments, after those of the interface.
        extra = {"sinks": tensors.sinks} if "sinks" in inspect.signature(cls.__init__).parameters else {}
        # The constructor has only vLLM's arguments, so spec and tensors are set before it runs.
        self = cls.__new__(cls)
        self.backend = backend
        self._set_ranks(dcp or ContextParallel(), pcp or ContextParallel())
        self._bind(spec, layer_name, tensors, kv_sharing_target_layer_name, options)
        # A constructor may set these again with the same values.
        before = dict(vars(self))
        cls.__init__(
            self,
            num_heads=spec.num_heads,
            head_size=spec.head_size,
            scale=spec.scale,
            num_kv_heads=spec.num_kv_heads,
            kv_cache_dtype=spec.kv_cache_dtype,
            # vLLM's constructors take a list.
            alibi_slopes=None if tensors.alibi_slopes is None else tensors.alibi_slopes.tolist(),
            sliding_window=spec.sliding_window,
            logits_soft_cap=spec.logits_soft_cap,
            attn_type=spec.attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            **extra,
        )
        if unread := constructor_faults(self, IMPL_INSTANCE_NAMES, before):
            raise PluginError(f"{where}: {unread}")
        return self

    def _bind(
        self,
        spec: LayerSpec,
        layer_name: str,
        tensors: LayerTensors,
        kv_sharing_target_layer_name: str | None = None,
        options: Any = None,
    ) -> None:
        self.spec = spec
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.head_size, self.scale = spec.head_size, spec.scale
        self.kv_cache_dtype = spec.kv_cache_dtype
        self.layer_name = layer_name
        self.tensors = tensors
        self.options = options
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called once, after the weights are loaded and before the first call, for impls that repack weights.

        Every client of `from_spec` calls it with the torch dtype of the layer's activations.
        """

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether `attend` can write outputs quantised by `quant_key`, a name such as "fp8_e4m3".

        The name is that of the output's dtype: see `attnplug.core.dtypes.output_quant_key`.
        """
        return False

    @abstractmethod
    def update_kv_cache(
        self,
        layer: AttentionLayer | None,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write `key [T, Hkv, D]` and `value [T, Hkv, Dv]` to the slots (int64 `[T]`); -1 is not written.

        fp8 storage divides by the scales of `layer`, or if it is None by those given to `from_spec`, and clamps.

        Raises:
            BatchError: key or value of another shape or dtype, or fewer rows than slots.
            LayoutError: a cache of another shape or dtype.
        """

    @abstractmethod
    def attend(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: _M,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend `query [T, H, D]` and write `output [T, H, Dv]`; it only reads the KV cache.

        Args:
            layer: the engine's layer, if it has scales of its own: these count, and not those given to `from_spec`.
            query: rows past the batch's tokens are not read.
            key: the new tokens' keys, or all keys with direct KV; None if they are in the pages.
            value: as `key`.
            kv_cache: the layer's cache in logical order; None for layers with direct_kv, encoders among them, and a
                backend refuses a cache there.
            attn_metadata: the step's metadata from this backend's builder.
            output: rows past the batch's tokens are not written.
            output_lse: float32 `[T, H]`, written; allowed only if the spec needs LSE.
            use_sinks: whether sinks enter the denominator; of several partial results exactly one has them.
            output_scale: one float32, for an `output` of 8 bits: written x output_scale = output, clamped to the
                dtype's range. Only for a dtype that `fused_output_quant_supported` has accepted.
            output_block_scale: scales of the blocks of each row, which the kernel computes and writes.

        Returns:
            `output`.

        Raises:
            BatchError: tensors that do not fit the spec or the batch; an undeclared LSE; an output scale that is not supported;
                a non-causal batch for a causal layer.
            LayoutError: a cache of another shape or dtype, or a cache beside direct K and V.
        """

    def forward(
        self,
        layer: AttentionLayer | None,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        attn_metadata: _M,
        output: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
        use_sinks: bool = True,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`update_kv_cache`, then `attend`; a layer that shares another's KV does not write.

        With MLA and no `value`, the value written is the latent part of `key`.

        Raises:
            BatchError: a key without its value.
            PluginError: metadata without slots.
        """
        if output is None:
            output = query.new_empty(query.shape[0], self.spec.num_heads, self.spec.output_size)
        # The target layer has written these pages; a second write would replace its K and V.
        if kv_cache is not None and key is not None and self.kv_sharing_target_layer_name is None:
            written = key[..., : self.spec.head_size_v] if value is None and self.spec.mla else value
            if written is None:
                raise BatchError("value", None, "is required where a key is written")
            slots = getattr(attn_metadata, "slot_mapping", None)
            if slots is None:
                what = f"the builder of {self.backend.get_name()} gave a {type(attn_metadata).__name__}"
                raise PluginError(f"{what} without slot_mapping; copy it from common_attn_metadata in build")
            self.update_kv_cache(layer, key, written, kv_cache, slots)
        return self.attend(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_lse=output_lse,
            use_sinks=use_sinks,
            output_scale=output_scale,
            output_block_scale=output_block_scale,
        )


class MLAAttentionImpl(AttentionImpl[_M], Generic[_M]):
    """Runs a layer of multi-head latent attention.

    `attend` takes queries `[T, H, nope + rope]` and gives `[T, H, v_head_dim]`; `key` is the latent
    `[T, 1, kv_lora_rank + rope]`, its positions rotated, and `value` None. `attnplug.mla.MLADecodeImpl` does all of it
    but for the decode on the latents.
    """

    @abstractmethod
    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: _M,
        k_scale: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Prefill with K and V expanded: `q [T, H, nope + rope]`, `output [T, H, v_head_dim]`.

        `kv_c_normed [T, kv_lora_rank]` and `k_pe [T, 1, rope]` are the latents of the new tokens.
        """

    @abstractmethod
    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        attn_metadata: _M,
        layer: AttentionLayer | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode on the latents: `[T, H, kv_lora_rank]`, and the LSE `[T, H]` if required.

        `q` is the absorbed query `[T, H, kv_lora_rank + rope]`, or its two parts.
        """


def _taking_backend(own: classmethod[Any, Any, Any]) -> classmethod[Any, Any, Any]:
    """A `from_spec` that knows no `backend`, for callers that give it."""

    @functools.wraps(own.__func__)
    def from_spec(
        cls: type, /, *args: Any, backend: type[AttentionBackend] | None = None, **given: Any
    ) -> AttentionImpl[Any]:
        made: AttentionImpl[Any] = own.__func__(cls, *args, **given)
        if backend is not None:
            made.backend = backend
        return made

    return classmethod(from_spec)
