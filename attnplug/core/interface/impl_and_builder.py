"""The impl and the builder of a backend: their faults against the interface, and the construction of a builder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from attnplug._system.text import shortened, shown
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import AttnplugError, BackendFaultError, PluginError
from attnplug.core.impl import AttentionImpl
from attnplug.core.interface.guarded import class_name, describe, guarded_call, mro_of
from attnplug.core.interface.interface import builder_faults, constructor_faults, impl_faults, in_lines
from attnplug.core.interface.ported_names import BUILDER_INSTANCE_NAMES
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.kv_cache_spec import KVCacheSpec
    from attnplug.core.spec import LayerSpec

_HOST_LENGTHS = ("none", "upper_bound", "exact")


def part_faults(impl: type, builder: type) -> list[str]:
    """The faults of the classes that `get_impl_cls` and `get_builder_cls` gave."""
    base = AttentionMetadataBuilder
    return [
        *(_base_fault("get_impl_cls", impl, AttentionImpl) or impl_faults(impl, AttentionImpl)),
        *(_base_fault("get_builder_cls", builder, base) or builder_faults(builder, base)),
    ]


def make_impl(backend: type[AttentionBackend], spec: LayerSpec, **arguments: Any) -> AttentionImpl[Any]:
    """The impl of one layer on a backend; arguments as `AttentionImpl.from_spec`.

    Raises:
        PluginError: the impl does not follow the interface; the error names the backend and what to write.
        SpecError: as `from_spec`.
    """
    impl = backend.get_impl_cls()
    _check_base(backend, "get_impl_cls", impl, AttentionImpl)
    made, error = guarded_call(impl.from_spec, spec, backend=backend, **arguments)
    where = f"{backend.get_name()} cannot run layer {shown(arguments.get('layer_name'))}"
    _raise_of(error, f"{where}: {class_name(impl)} raised")
    if AttentionImpl not in mro_of(type(made)):
        text = f"{where}: from_spec of {class_name(impl)} returned {shown(made)}, which is no AttentionImpl"
        raise PluginError(text)
    return made  # type: ignore[no-any-return]


def make_builder(
    backend: type[AttentionBackend],
    kv_cache_spec: KVCacheSpec,
    layer_names: Sequence[str],
    config: BuilderConfig,
    device: torch.device,
) -> AttentionMetadataBuilder[Any]:
    """A backend's builder for layers with one kind of pages.

    Raises:
        PluginError: the builder does not follow the interface; the error names the backend and what to write.
    """
    builder = backend.get_builder_cls()
    _check_base(backend, "get_builder_cls", builder, AttentionMetadataBuilder)
    if faults := builder_faults(builder, AttentionMetadataBuilder):
        raise PluginError(f"{backend.get_name()} cannot build metadata:{in_lines(faults)}")
    made, error = guarded_call(builder, kv_cache_spec, layer_names, config, device)
    where = f"{backend.get_name()} cannot build metadata"
    remedy = ""
    # A ported constructor reads fields of vLLM's configuration, which raises these.
    if isinstance(error, (AttributeError, TypeError)):
        fields = ", ".join(field.name for field in dataclasses.fields(BuilderConfig))
        remedy = f"; its third argument is attnplug's BuilderConfig, with {fields}"
    layers = f" (layers {shortened(', '.join(map(str, layer_names)), 200)})"
    _raise_of(error, f"{where}: {builder.__name__} raised", remedy + layers)
    if AttentionMetadataBuilder not in mro_of(type(made)):
        what = f"its constructor returned {shown(made)}, which is no AttentionMetadataBuilder"
        raise PluginError(f"{where}: {builder.__name__} cannot be made, {what}{layers}")
    if wrong := constructor_faults(made, BUILDER_INSTANCE_NAMES, {}) or _wrong_value(made):
        raise PluginError(f"{backend.get_name()} cannot build metadata: {wrong}")
    return made  # type: ignore[no-any-return]


def _raise_of(error: BaseException | None, what: str, remedy: str = "") -> None:
    """Raise what a constructor of a plugin raised: attnplug's own errors as they are, others with `what` before."""
    # Errors of memory and of devices stay as they are too, because callers make room and try again.
    if error is None:
        return
    if isinstance(error, (AttnplugError, MemoryError, torch.OutOfMemoryError, GeneratorExit)):
        raise error
    raise PluginError(f"{what} {describe(error)}{remedy}") from error


def is_metadata(value: object) -> bool:
    """Whether a value can be a step's metadata; that of ported backends is a dataclass of their own."""
    return isinstance(value, AttentionMetadata) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def checked_metadata(backend: type[AttentionBackend], method: str, made: Any) -> Any:
    """The metadata that a `method` of a backend's builder gave; BackendFaultError for anything else."""
    if not is_metadata(made):
        what = f"{backend.get_name()}: {method} of its builder returned {shown(made)}"
        raise BackendFaultError(f"{what}, which is no metadata; return an instance of AttentionMetadata")
    return made


def _wrong_value(builder: AttentionMetadataBuilder[Any]) -> str | None:
    """The attribute of a builder that an engine cannot read, and its remedy; None if there is none."""
    threshold, title = builder.reorder_batch_threshold, type(builder).__name__
    if threshold is not None and (type(threshold) is not int or threshold < 1):
        return f"{title}.reorder_batch_threshold is {shown(threshold)}; it must be None, or a query length from 1 on"
    if type(builder.supports_update_block_table) is not bool:
        found = shown(builder.supports_update_block_table)
        return f"{title}.supports_update_block_table is {found}; it must be True or False"
    if builder.needs_host_seq_lens not in _HOST_LENGTHS:
        found = shown(builder.needs_host_seq_lens)
        return f"{title}.needs_host_seq_lens is {found}; it must be one of {', '.join(_HOST_LENGTHS)}"
    return None


def _check_base(backend: type[AttentionBackend], getter: str, part: object, base: type) -> None:
    for fault in _base_fault(getter, part, base):
        raise PluginError(f"{backend.get_name()}.{fault}")


def _base_fault(getter: str, part: object, base: type) -> tuple[str, ...]:
    """The fault of a part that is not a subclass of `base`; the part's metaclass is not asked."""
    if isinstance(part, type) and base in mro_of(part):
        return ()
    return (f"{getter} gives {shown(part)}; subclass {base.__name__} of attnplug.core",)
