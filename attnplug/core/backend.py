"""The class that declares one backend. It imports no torch; its impl and builder are imported on demand.

Also finds the backend of an impl, for engines that do not name it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from attnplug.core.blocks import MultipleOf
from attnplug.core.dtypes import bare_dtype_name, kv_cache_dtype_name, stored_dtype_name
from attnplug.core.errors import LayoutError, PluginError
from attnplug.core.features import FEATURES, Feature
from attnplug.core.interface.answers import answer, declared, serving_class
from attnplug.core.interface.guarded import class_name, guarded_call
from attnplug.core.kv_format import kv_format
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.core.validation import accepts_blocks, reads_blocks, stored_dtypes, validate

if TYPE_CHECKING:
    import torch

    from attnplug.core.composite.steps import StepPriority
    from attnplug.core.device import Device
    from attnplug.core.impl import AttentionImpl
    from attnplug.core.metadata import AttentionMetadataBuilder
    from attnplug.core.reasons import Reason


# No kernel reads larger pages, so a search for a block size ends here.
_LARGEST_BLOCK = 1024


class AttentionBackend(ABC):
    """Declares one backend. Never instantiated; its module imports no torch and no kernel library.

    A subclass overrides the attributes and methods below. It serves only what it declares.
    """

    family: ClassVar[str | None] = None
    """A name that several backends share, such as "FLASH_ATTN" for three generations of one library."""
    requires: ClassVar[Sequence[str | tuple[str, ...]]] = ()
    """Distributions that must be installed, as PEP 508 strings; a tuple gives alternatives."""
    device_types: ClassVar[Sequence[str]] = ("cuda",)
    """The Device types it runs on."""
    supported_dtypes: ClassVar[Sequence[object]] = ("float16", "bfloat16")
    """Element types of queries, keys, values and outputs, as names or torch dtypes."""
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = ("auto",)
    """Storage types of the KV cache; "auto" is the dtype of K and V."""
    supported_phases: ClassVar[Sequence[Phase | str]] = (Phase.DECODE, Phase.PREFILL)
    """The phases it serves. A backend that serves a layer alone needs both."""
    features: ClassVar[Feature] = Feature(0)
    """The features it serves; see Feature."""
    supported_sparse_kinds: ClassVar[Sequence[str]] = ("token_topk",)
    """The kinds of SparseSpec that a backend with Feature.SPARSE serves, of SPARSE_KINDS."""
    serves_dense: ClassVar[bool] = False
    """Whether a backend with Feature.SPARSE serves layers without a SparseSpec too. By default it refuses them,
    because kernels that read a selection usually need one."""
    supported_invariances: ClassVar[Sequence[str]] = ()
    """The words of INVARIANCES that a backend with Feature.INVARIANCE keeps, bit by bit."""
    supported_state_rules: ClassVar[Sequence[str]] = ()
    """The rules of STATE_RULES that a backend with Feature.STATE serves. Such a backend serves no attention layers."""
    step_safe: ClassVar[bool] = False
    """Whether build and forward neither make the host wait nor allocate memory that grows with context."""
    quantizes_queries: ClassVar[bool] = False
    """Whether kernels round queries, or weights, to 8 bits for layers whose pages have 8 bits. By default the
    conformance kit compares such layers as closely as others, since its oracle reads the values as stored."""
    drafts_on_prefill: ClassVar[bool] = False
    """Whether decodes of several tokens, such as drafts, run on its prefill kernels. For such steps a plan ranks it by
    the lower of its priorities in both phases."""
    Options: ClassVar[type[Any] | None] = None
    """A frozen dataclass of the options that a user may set, or None."""
    accept_output_buffer: ClassVar[bool] = True
    """Always True: `attend` writes the output that it is given."""
    depends_on_capability: ClassVar[bool] = False
    """Whether it serves only some GPUs; a class that overrides `supports_compute_capability` does without this."""

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The name that users type, such as "TORCH"."""

    @classmethod
    @abstractmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        """The class that runs a layer; imports the heavy module when called."""

    @classmethod
    @abstractmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        """The class that builds a step's metadata; imports the heavy module when called."""

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """The module and the qualified name of the class."""
        return cls.__module__, cls.__qualname__

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """Its rank in automatic selection, 1 to 999, higher first. TORCH has 0, TRITON 100, vendor libraries 200 and up."""
        return 50

    @classmethod
    def get_step_priorities(cls, spec: LayerSpec, device: Device) -> Sequence[StepPriority]:
        """Its ranks for ranges of steps in which it is faster, or slower, than its priority in the phase says.

        A plan gives such steps of a layer to another backend on the same KV cache, if that ranks higher there.
        """
        return ()

    @classmethod
    def for_layer(cls, spec: LayerSpec) -> type[AttentionBackend]:
        """The class that serves a layer under this name; by default this one.

        A backend that serves two kinds of layers by separate impls overrides it, such as for latent attention. The
        other class has the same name, is never offered by a plugin, and returns itself.
        """
        return cls

    # Limits

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        """Head sizes it serves, as numbers or MultipleOf; an empty sequence means any."""
        return ()

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether `get_supported_head_sizes` allows a head size."""
        sizes = answer(cls, "get_supported_head_sizes")
        return not sizes or MultipleOf.allows(sizes, head_size)

    @classmethod
    def supports_dtype(cls, dtype: object) -> bool:
        """Whether `supported_dtypes` has a dtype, given by name or as a torch dtype.

        Validation gives an override the name as text that also equals the torch dtype.
        """
        field = "supported_dtypes"
        return bare_dtype_name(dtype, "dtype") in [
            bare_dtype_name(each, field) for each in declared(cls, field)
        ]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Whether `supported_kv_cache_dtypes` has a storage type; None asks for no particular one.

        Validation gives an override the name in the layer's spec.
        """
        if kv_cache_dtype is None:
            return True
        name = kv_cache_dtype_name(kv_cache_dtype)
        return not {name, stored_dtype_name(name, name)}.isdisjoint(stored_dtypes(cls))

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether `get_supported_kernel_block_sizes` has a block size for some spec; None asks for none.

        An override can only narrow the sizes: a block is a page that the kernel reads.
        """
        return block_size is None or MultipleOf.allows(
            answer(cls, "get_supported_kernel_block_sizes"), block_size
        )

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, spec: LayerSpec | None = None, device: Device | None = None
    ) -> Sequence[int | MultipleOf]:
        """Tokens per KV page that it can read, as numbers or MultipleOf; without arguments for any spec."""
        return (MultipleOf(1),)

    @classmethod
    def get_preferred_block_size(
        cls, spec: LayerSpec | None = None, device: Device | None = None, default: int = 16
    ) -> int:
        """The block size it chooses if the engine gives none: `default`, or the nearest that it can read."""
        sizes = answer(cls, "get_supported_kernel_block_sizes", spec, device)
        size = MultipleOf.nearest(sizes, default)
        if accepts_blocks(cls, size):
            return size
        # An override of supports_block_size narrows the sizes, and it can only be asked for one at a time.
        every = range(1, _LARGEST_BLOCK + 1)
        return MultipleOf.nearest([n for n in every if reads_blocks(cls, n, spec, device)], default)

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """Whether it runs on a GPU of this compute capability `(major, minor)`."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: AttentionType) -> bool:
        """Whether it serves an attention type; by default decoders, and what `features` add."""
        flags = [flag for flag in FEATURES if flag.ask.field == "attn_type" and attn_type in flag.ask.values]
        return attn_type == AttentionType.DECODER or any(flag in cls.features for flag in flags)

    @classmethod
    def is_mla(cls) -> bool:
        """Whether it serves multi-head latent attention, and only that."""
        return Feature.MLA in cls.features

    @classmethod
    def is_sparse(cls) -> bool:
        """Whether it serves sparse attention; only that, unless `serves_dense`."""
        return Feature.SPARSE in cls.features

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether it honours sinks."""
        return Feature.SINKS in cls.features

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Whether it honours spans of multimodal tokens that see each other in both directions."""
        return Feature.MM_PREFIX in cls.features

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Why it cannot serve this spec although each attribute alone is served; None if it can."""
        return None

    @classmethod
    def validate_configuration(
        cls, spec: LayerSpec, device: Device, phase: Phase | None = None
    ) -> list[Reason]:
        """Every reason why it does not serve `spec` on `device` in `phase`, in a fixed order.

        An empty list promises that the layer is served in full. A feature that the spec asks for and the
        class does not declare is refused. `phase=None` asks for both phases. The class that `for_layer` gives answers.
        """
        serving = serving_class(cls, spec)
        if serving is not cls:
            return serving.validate_configuration(spec, device, phase)
        return validate(cls, spec, device, phase)

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable | None:
        """A key of the kernels that serving `spec` compiles; None if it compiles nothing.

        Layers with equal keys share the compiled kernels. The conformance kit runs only a few keys.
        """
        return None

    @classmethod
    def watch_compiling(cls) -> AbstractContextManager[list[str]]:
        """A context whose list collects the name of each kernel that is compiled or loaded inside.

        By default the list stays empty. `AttentionRuntime.warm_up` reports it.
        """
        return contextlib.nullcontext([])

    # KV cache

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype: str = "auto",
        head_size_v: int | None = None,
    ) -> tuple[int, ...]:
        """Logical shape of one layer's cache: `(num_blocks, 2, block_size, num_kv_heads, head_size)`.

        With another `head_size_v`: `(num_blocks, block_size, num_kv_heads, head_size + head_size_v)`,
        K first. With MLA: `(num_blocks, block_size, head_size)`. A format with planes has the bytes of a row, in
        place of `head_size`; `attnplug.ops.kv_codec.page_planes` views them.
        """
        if answer(cls, "is_mla"):
            return (num_blocks, block_size, head_size)
        if head_size_v not in (None, head_size):
            return (num_blocks, block_size, num_kv_heads, head_size + (head_size_v or 0))
        return (num_blocks, 2, block_size, num_kv_heads, kv_format(cache_dtype).width(head_size))

    @classmethod
    def split_kv(cls, kv_cache: torch.Tensor, spec: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """K `[num_blocks, block_size, num_kv_heads, head_size]` and V as strided views of a cache.

        With MLA both are `[num_blocks, block_size, 1, ...]` views of the one latent.
        """
        if spec.mla is not None:
            latent = kv_cache.unsqueeze(2)
            return latent, latent[..., : spec.head_size_v]
        if spec.head_size_v != spec.head_size:
            return kv_cache[..., : spec.head_size], kv_cache[..., spec.head_size :]
        return kv_cache[:, 0], kv_cache[:, 1]

    @classmethod
    def supported_kv_cache_layouts(cls) -> Sequence[str]:
        """Physical orders it can read, preferred first: "NHD" (token, head) and "HND" (head, token)."""
        return ("NHD", "HND")

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        """The only layout that it can read, from `supported_kv_cache_layouts`; None if it reads several."""
        layouts = answer(cls, "supported_kv_cache_layouts")
        return layouts[0] if len(layouts) == 1 else None

    @classmethod
    def get_kv_cache_stride_order(
        cls,
        include_num_layers_dimension: bool = False,
        *,
        layout: str | None = None,
        spec: LayerSpec | None = None,
    ) -> tuple[int, ...]:
        """The logical dimensions in physical order, outermost first.

        With `include_num_layers_dimension` the logical shape begins with the number of layers, and a
        block's layers are adjacent. `layout` defaults to the preferred one. `spec` is needed for shapes
        of another `head_size_v` and of MLA.

        Raises:
            LayoutError: a `layout` that it cannot read.
        """
        layouts = answer(cls, "supported_kv_cache_layouts")
        if layout is not None and layout not in layouts:
            limit = f"must be one that {cls.get_name()} reads: {', '.join(layouts)}"
            raise LayoutError("layout", layout, limit)
        hnd = (layout or layouts[0]) == "HND"
        # A latent cache has no dimension of heads, so both layouts have the same order.
        if spec.mla is not None if spec is not None else answer(cls, "is_mla"):
            order: tuple[int, ...] = (0, 1, 2)
        elif spec is not None and spec.head_size_v != spec.head_size:
            order = (0, 2, 1, 3) if hnd else (0, 1, 2, 3)
        else:
            order = (0, 1, 3, 2, 4) if hnd else (0, 1, 2, 3, 4)
        if include_num_layers_dimension:
            return (1, 0, *(dim + 1 for dim in order[1:]))
        return order


def subclass_attention_backend(
    name_prefix: str,
    attention_backend_cls: type[AttentionBackend],
    builder_cls: type[AttentionMetadataBuilder[Any]],
) -> type[AttentionBackend]:
    """A subclass named `name_prefix` + the backend's class name that builds with `builder_cls`."""

    def get_builder_cls(cls: type[AttentionBackend]) -> type[AttentionMetadataBuilder[Any]]:
        return builder_cls

    return subclass_attention_backend_with_overrides(
        name_prefix, attention_backend_cls, {"get_builder_cls": classmethod(get_builder_cls)}
    )


def subclass_attention_backend_with_overrides(
    name_prefix: str, attention_backend_cls: type[AttentionBackend], overrides: Mapping[str, Any]
) -> type[AttentionBackend]:
    """A subclass named `name_prefix` + the backend's class name, with attributes replaced.

    Plain functions in `overrides` become static methods.
    """
    # Errors name a backend by its module, which would otherwise be this one.
    namespace = {"__module__": attention_backend_cls.__module__, **overrides}
    for name, value in overrides.items():
        # A class such as Options is callable too, and it must stay a class.
        if callable(value) and not isinstance(value, (type, staticmethod, classmethod)):
            namespace[name] = staticmethod(value)
    return type(name_prefix + attention_backend_cls.__name__, (attention_backend_cls,), namespace)


def backend_of(impl: type) -> type[AttentionBackend]:
    """The one backend whose `get_impl_cls` gives `impl`, of the nearest package around it that has such a backend.

    Raises:
        PluginError: no backend there gives it, or several do.
    """
    backends: list[type[AttentionBackend]] = [AttentionBackend]  # type: ignore[type-abstract]
    for each in backends:
        backends += each.__subclasses__()
    parts = impl.__module__.split(".")
    found: set[type[AttentionBackend]] = set()
    while parts and not found:
        near = [each for each in backends if each.__module__.split(".")[: len(parts)] == parts]
        found = {each for each in near if guarded_call(each.get_impl_cls)[0] is impl}
        parts.pop()
    if len(found) == 1:
        return found.pop()
    several = ", ".join(sorted(map(class_name, found)))
    why = (
        f"several backends give this impl ({several})"
        if found
        else "no backend in its package gives this impl"
    )
    raise PluginError(
        f"{class_name(impl)}.from_spec cannot know the backend: {why}; write from_spec(spec, backend=backend, ...)"
    )
