"""The registry of the process, and the functions that use it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Unpack

from attnplug.core.errors import PluginError
from attnplug.registry.devices import DeviceLike
from attnplug.registry.plugins.waiting import waited
from attnplug.registry.registry import Registry, SelectKwargs

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.spec import LayerSpec, Phase
    from attnplug.registry.plugins.records import PluginRecord
    from attnplug.registry.selection.decision import Decision

# Reentrant, so that a plugin that asks the registry while it loads gets an error, not a deadlock.
_lock = threading.RLock()
_registry: Registry | None = None
_building: int | None = None
"""The thread that builds the registry."""


def get_registry() -> Registry:
    """The process's registry of installed plugins, built at the first call.

    Raises:
        PolicyError: an environment variable whose value is not allowed.
        PluginError: a plugin that did not load, under ATTNPLUG_STRICT; or a call by a plugin while it is
            being loaded.
    """
    global _building, _registry  # noqa: PLW0603  (the one instance)
    # Tested again under the lock: later calls take no lock, and only one registry is built.
    if _registry is None:
        # The plugin being loaded may wait for this thread, or need a module that this thread imports.
        if not waited(lambda seconds: _lock.acquire(timeout=seconds), lambda: _building):
            text = (
                "another thread builds the registry, and may wait for this thread or a module that it imports"
            )
            raise PluginError(f"{text}; ask the registry after the import")
        try:
            if _building is not None:
                raise PluginError("the registry is being built; a plugin cannot ask it while it is loaded")
            if _registry is None:
                _building = threading.get_ident()
                try:
                    _registry = Registry()
                finally:
                    # Also after an error, so that the next call can build the registry.
                    _building = None
        finally:
            _lock.release()
    return _registry


def select(
    spec: LayerSpec,
    device: DeviceLike = None,
    phase: Phase | str | None = None,
    *,
    layer_name: str | None = None,
    **kwargs: Unpack[SelectKwargs],
) -> Decision:
    """The backend for one layer.

    Args:
        spec: what the layer needs.
        device: a Device, text such as "sm90" or "cpu", a torch.device, or None for the current one.
        phase: "decode" or "prefill"; None asks for a backend that serves both.
        layer_name: the layer's name, for rules by name and for messages.
        **kwargs: backend, options, assume_installed and allow_refuted, as in `SelectKwargs`.

    Raises:
        NoBackendError: none serves it; the message lists every candidate with its reasons.
        BackendUnavailableError: the one asked for does not serve it. No other takes its place.
        UnknownBackendError: no plugin offers the name asked for.
        PolicyError: rules, options, versions or names that are not valid; or, without a `phase`, a rule that
            would choose the layer's backend in one phase only.
        PluginError: the plugin asked for by name did not load.
    """
    return get_registry().select(spec, device, phase, layer_name=layer_name, **kwargs)


def explain(
    spec: LayerSpec,
    device: DeviceLike = None,
    phase: Phase | str | None = None,
    *,
    layer_name: str | None = None,
    **kwargs: Unpack[SelectKwargs],
) -> Decision:
    """As `select`, but imports no backend's parts and never raises for lack of a backend."""
    return get_registry().explain(spec, device, phase, layer_name=layer_name, **kwargs)


def select_layers(
    specs: Mapping[str, LayerSpec],
    device: DeviceLike = None,
    phase: Phase | str | None = None,
    **kwargs: Unpack[SelectKwargs],
) -> dict[str, Decision]:
    """A backend for each layer of a model, with one block size and KV layout for like caches.

    Takes what `select` takes; layer-name rules are matched against the keys of `specs`.

    Raises:
        NoBackendError, BackendUnavailableError: for the first layer that cannot be served.
        SpecError: `specs` is not a mapping of layer names to LayerSpec; a ModelSpec has one in `layers`.
        PolicyError: as `select`, and for a rule that matches no layer.
        LayoutError: layers with like caches whose backends agree on no block size or layout.
    """
    return get_registry().select_layers(specs, device, phase, **kwargs)


def list_backends() -> Mapping[str, type[AttentionBackend]]:
    """The loaded backends by name."""
    return get_registry().backends()


def register(plugin: object, name: str | None = None) -> PluginRecord:
    """Add a module or object with a plugin's hooks to the process's registry; see `Registry.register`."""
    return get_registry().register(plugin, name)
