"""Finds plugins, loads each one alone, and keeps a record of it.

pluggy's `load_setuptools_entrypoints` is not used, because it stops at the first plugin that raises.
Here an error is recorded against its plugin, and the next one is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pluggy

from attnplug._system.text import shortened, shown
from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import PluginError, SpecError
from attnplug.core.interface.answers import DECLARED, NAME_RULE, declared, forget_answers, plain_name
from attnplug.core.interface.guarded import class_name, describe, guarded_call, mro_of, plain_list
from attnplug.core.interface.interface import backend_faults, in_lines
from attnplug.core.interface.signatures import class_fault, is_own
from attnplug.core.kv_format import KVFormat, register_kv_formats
from attnplug.registry.plugins.installed import check_requirements
from attnplug.registry.plugins.records import (
    API_VERSION,
    ENTRY_POINT_GROUP,
    PROJECT,
    BackendHooks,
    Offer,
    PluginRecord,
    PluginStatus,
    canonical_name,
)
from attnplug.registry.plugins.waiting import announce, module_is_free

RESERVED_NAMES = frozenset(
    {
        *("TORCH", "TRITON", "FLASHINFER", "FLASH_MLA"),
        *("FLASH_ATTN", "FLASH_ATTN_2", "FLASH_ATTN_3", "FLASH_ATTN_4"),
    }
)
"""Backend and family names that only attnplug itself may offer."""

_LONGEST_NAME, _LONGEST_REASON = 500, 4000

# Listing imports every plugin, so a plugin that imports one of these slows down every process.
_HEAVY = ("torch", "triton", "flash_attn", "flash_mla", "flashinfer", "jax", "transformers")


@dataclasses.dataclass(frozen=True, slots=True)
class Installed:
    """A plugin of an installed distribution, not imported yet; without an entry point it cannot be."""

    record: PluginRecord
    entry_point: importlib.metadata.EntryPoint | None

    @property
    def is_builtin(self) -> bool:
        """Whether attnplug itself ships it. The module must be attnplug's own: a file of metadata can name any distribution."""
        point = self.entry_point
        return self.record.distribution == PROJECT and point is not None and _is_own_module(point.value)


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A plugin that was imported: its record, the object with the hooks, and its offers."""

    record: PluginRecord
    plugin: object = None
    offers: tuple[Offer, ...] = ()


class _Rejected(Exception):  # noqa: N818  (caught here; it becomes a record)
    def __init__(self, reason: str, status: PluginStatus = PluginStatus.BROKEN) -> None:
        self.status = status
        super().__init__(reason)


def installed_plugins() -> list[Installed]:
    """Every entry point of the group `attnplug.backends`, sorted by name; runs none of them."""
    found: dict[str, Installed] = {}
    seen: set[str] = set()
    for dist in importlib.metadata.distributions():
        text, error = _read(dist, "entry_points.txt")
        # Most distributions have no plugin, and an unreadable file of another one is not an error here.
        if not text or ENTRY_POINT_GROUP not in text:
            continue
        distribution, version = _identity(dist)
        # Python imports the first on sys.path, so a later distribution of the name is not the one installed.
        # Another one that calls itself attnplug must not hide attnplug's own.
        canonical = canonical_name(distribution)
        if canonical in seen and canonical != PROJECT:
            continue
        seen.add(canonical)
        points: Any = ()
        if error is None:
            points, error = guarded_call(lambda: list(dist.entry_points.select(group=ENTRY_POINT_GROUP)))  # noqa: B023
        for point in points or ():
            name = f"{distribution}:{point.name}"
            if name not in found or found[name].entry_point is None:
                found[name] = _installed(name, distribution, version, point)
        if error is not None:
            name = f"{distribution}:entry_points.txt"
            reason = f"{name} cannot be read: {describe(error)}"
            record = PluginRecord(name, distribution, version, PluginStatus.BROKEN, reason)
            found.setdefault(name, Installed(record, None))
    return [found[name] for name in sorted(found)]


def _installed(
    name: str, distribution: str, version: str | None, point: importlib.metadata.EntryPoint
) -> Installed:
    """A plugin that may be loaded, or its record alone where its names could mislead a user."""
    status, fault = PluginStatus.BLOCKED, "was not run"
    if not (distribution + point.name + point.value).isprintable() or ":" in distribution:
        status, fault = PluginStatus.BROKEN, "has characters in its names that no name may have"
    elif max(map(len, (distribution, point.name, point.value))) > _LONGEST_NAME:
        status, fault = PluginStatus.BROKEN, f"has a name of more than {_LONGEST_NAME} characters"
        name = f"{distribution[:_LONGEST_NAME]}:{point.name[:_LONGEST_NAME]}"
    elif distribution == PROJECT and not _is_own_module(point.value):
        status, fault = PluginStatus.BROKEN, f"calls itself {PROJECT}, but its module is {point.value}"
    record = PluginRecord(name, distribution, version, status, f"{name} {fault}")
    return Installed(record, point if status is PluginStatus.BLOCKED else None)


def _is_own_module(name: str) -> bool:
    return name.startswith(f"{ENTRY_POINT_GROUP}.")


def _read(dist: importlib.metadata.Distribution, file: str) -> tuple[str, BaseException | None]:
    """The text of a file of metadata, "" without one, and the error; bytes that are no UTF-8 are read as Latin-1."""
    text, error = guarded_call(dist.read_text, file)
    if isinstance(error, UnicodeDecodeError):
        text = error.object.decode("latin-1")
    return text or "", error


def _identity(dist: importlib.metadata.Distribution) -> tuple[str, str | None]:
    """Name and version, from the head of the metadata."""
    # To parse all of it is slower than all other steps.
    # A wheel has METADATA. An installation by setuptools for development has PKG-INFO, in an .egg-info.
    text = _read(dist, "METADATA")[0] or _read(dist, "PKG-INFO")[0]
    head = text.partition("\n\n")[0]
    name, version = (re.search(rf"^{field}: *(\S.*)", head, re.MULTILINE) for field in ("Name", "Version"))
    return name[1].strip() if name else "unknown", version[1].strip() if version else None


class _OnePlugin(pluggy.PluginManager):
    """A pluggy manager of one plugin."""

    # One for each, so that errors belong to that plugin alone.

    def __init__(self, plugin: object, name: str) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(BackendHooks)
        self.plugin = plugin
        self.name = name

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        """The options of a hook's specification; None for the names that every class has."""
        # Each plugin has a manager, and pluggy reads these names with the slow getattr_static.
        return None if name.startswith("__") else super().parse_hookspec_opts(module_or_class, name)

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """The options of a hook's decorator; None where `name` is not a function of the plugin."""
        # Older pluggy reads every attribute, which runs the lazy exports of a plugin's package.
        if isinstance(plugin, types.ModuleType) and not inspect.isfunction(vars(plugin).get(name)):
            return None
        found = inspect.getattr_static(plugin, name, None)
        return super().parse_hookimpl_opts(plugin, name) if inspect.isroutine(found) else None


class Host:
    """Keeps the loaded plugins in pluggy and calls each of them alone."""

    def __init__(self, *, reads_parts: bool = False) -> None:
        # Whether the impl and the builder of a refused backend are read too, which runs more of its code.
        self._reads_parts = reads_parts
        # By id: two equal plugin objects are two plugins, and some plugin objects are not hashable.
        self._managers: dict[int, _OnePlugin] = {}

    def load(self, found: Installed) -> Loaded:
        """Import and admit an installed plugin; an exception goes into its record.

        Raises:
            PluginError: another thread imports the module, and may wait for this one.
        """
        if found.entry_point is None:
            return Loaded(found.record)
        if ":" in found.entry_point.value:
            limit = f"names {found.entry_point.value}; an entry point of attnplug names a module, without ':'"
            return _broken(found.record, limit)
        # This plugin is not at fault for a module that was imported earlier.
        before = {name for name in _HEAVY if name in sys.modules}
        if not module_is_free(found.entry_point.value):
            text = f"another thread imports {found.entry_point.value}, and may wait for this thread"
            raise PluginError(f"{text}; ask the registry after the import")
        announce(f"while it imported the plugin {found.record.name}")
        plugin, error = guarded_call(found.entry_point.load)
        announce()
        if error is not None:
            return _broken(found.record, f"raised {describe(error)} when imported")
        loaded = self.check_and_load(found.record, plugin)
        heavy = [name for name in _HEAVY if name in sys.modules and name not in before]
        if heavy and loaded.record.status is PluginStatus.LOADED:
            warning = f"{found.record.name} imports {', '.join(heavy)} when listed; import that in get_impl_cls or get_builder_cls"
            return dataclasses.replace(loaded, record=dataclasses.replace(loaded.record, reason=warning))
        return loaded

    def check_and_load(self, record: PluginRecord, plugin: object) -> Loaded:
        """Check a plugin object against the interface and get its backends."""
        forget_answers()
        announce(f"while it examined the plugin {record.name}")
        found, error = guarded_call(self._offers, record, plugin)
        announce()
        if isinstance(error, _Rejected):
            return _broken(record, str(error), plugin, error.status)
        if error is not None:
            return _broken(record, f"raised {describe(error)} when examined", plugin)
        offers, formats = found
        names = {"backends": tuple(offer.name for offer in offers), "formats": formats}
        admitted = dataclasses.replace(record, status=PluginStatus.LOADED, reason=None, **names)
        return Loaded(admitted, plugin, offers)

    def call(self, hook: str, plugin: object, **arguments: Any) -> Any:
        """The result of one plugin's hook; None where it does not have the hook."""
        manager = self._managers.get(id(plugin))
        # A manager has one plugin, and pluggy drops a result of None, so there is at most one.
        results = None if manager is None else getattr(manager.hook, hook)(**arguments)
        return results[0] if results else None

    def has_hook(self, hook: str, plugin: object) -> bool:
        """Whether a loaded plugin implements `hook`."""
        manager = self._managers.get(id(plugin))
        return manager is not None and bool(getattr(manager.hook, hook).get_hookimpls())

    def _has_any(self, plugin: object, *hooks: str) -> bool:
        return any(self.has_hook(hook, plugin) for hook in hooks)

    def _offered(self, hook: str, plugin: object) -> Sequence[Any]:
        """What a hook of a plugin returned, which must be a tuple or a list; () without the hook."""
        if not self.has_hook(hook, plugin):
            return ()
        offered, error = guarded_call(self.call, hook, plugin)
        if error is not None:
            raise _Rejected(f"raised {describe(error)} in {hook}") from error
        # A subclass may count and iterate as it likes.
        if type(offered) not in (tuple, list):
            kind = "backend classes" if hook == "attnplug_backends" else "KVFormats"
            what = f"returned {shown(offered)} from {hook}"
            raise _Rejected(f"{what}; it must be a sequence of {kind}: a plain tuple or list")
        return plain_list(offered)

    def forget(self, plugin: object) -> None:
        """Remove a plugin, if it was loaded."""
        self._managers.pop(id(plugin), None)

    def copy(self) -> Host:
        """A host with the same plugins, whose changes do not reach this one."""
        made = Host(reads_parts=self._reads_parts)
        made._managers = dict(self._managers)
        return made

    def _offers(self, record: PluginRecord, plugin: object) -> tuple[tuple[Offer, ...], tuple[str, ...]]:
        _check_api(plugin)
        # One module under two names would be in conflict with itself over each backend.
        twin = self._managers.get(id(plugin))
        if twin is not None:
            raise _Rejected(f"is the same module as {twin.name}, which is loaded")
        manager = _OnePlugin(plugin, record.name)
        self._managers[id(plugin)] = manager
        try:
            manager.register(plugin, record.name)
            manager.check_pending()
            has_backends = self.has_hook("attnplug_backends", plugin)
            # A plugin may offer formats, or rank the backends of others, and have no backend.
            if not has_backends and not self._has_any(plugin, "attnplug_rank", "attnplug_kv_formats"):
                raise _Rejected("has no hook attnplug_backends")
            offered = self._offered("attnplug_backends", plugin) if has_backends else ()
            # In the author's own process, torch is no cost where it is there already.
            reads_parts = self._reads_parts or (record.distribution is None and "torch" in sys.modules)
            offers = tuple(_checked(record, offered, reads_parts))
            # The table of formats is the process's, so most plugins that are refused do not come so far.
            return offers, _registered(record, self._offered("attnplug_kv_formats", plugin))
        except pluggy.PluginValidationError as invalid:
            self.forget(plugin)
            text = re.sub(r" in plugin <.*>| for hook", "", " ".join(str(invalid).split()))
            raise _Rejected(f"does not follow the hooks: {text}") from invalid
        except BaseException:
            # Caught so broadly because a rejected plugin must leave no trace: it may be registered again.
            self.forget(plugin)
            raise


def _broken(
    record: PluginRecord, what: str, plugin: object = None, status: PluginStatus = PluginStatus.BROKEN
) -> Loaded:
    reason = shortened(f"{record.name} {what}", _LONGEST_REASON)
    return Loaded(dataclasses.replace(record, status=status, reason=reason), plugin)


def _check_api(plugin: object) -> None:
    line = f"ATTNPLUG_API = ({API_VERSION}, {API_VERSION})"
    api = getattr(plugin, "ATTNPLUG_API", None)
    if api is None:
        raise _Rejected(f"does not say which interface it is for; add {line}")
    if not (isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)):
        raise _Rejected(f"has ATTNPLUG_API = {shown(api)}; it must read {line}")
    low, high = api
    if not low <= API_VERSION <= high:
        what = f"is for plugin interface {low} to {high}; this attnplug offers {API_VERSION}"
        raise _Rejected(what, PluginStatus.INCOMPATIBLE)


def _registered(record: PluginRecord, formats: Sequence[Any]) -> tuple[str, ...]:
    """The names of a plugin's formats, which are in the table of stored types from now on."""
    for each in formats:
        if type(each) is not KVFormat:
            raise _Rejected(f"offers {shown(each)} in attnplug_kv_formats, which is not a KVFormat")
    try:
        register_kv_formats(formats, record.owner)
    except SpecError as problem:
        status = PluginStatus.CONFLICT if "another KV format" in problem.limit else PluginStatus.BROKEN
        raise _Rejected(f"offers a KV format whose {problem}", status) from problem
    return tuple(each.name for each in formats)


def _checked(record: PluginRecord, offered: Sequence[Any], reads_parts: bool) -> Iterator[Offer]:
    seen: set[str] = set()
    for backend in offered:
        name = _backend_name(backend, reads_parts)
        offer = Offer(name, backend, record.name, record.distribution, record.version)
        for each in (name, offer.declared.family or ""):
            # A registry made in code may have attnplug's own modules: Registry(plugins=[torch_native]).
            is_ours = is_own(backend) and record.distribution in (PROJECT, None)
            if each.upper() in RESERVED_NAMES and not is_ours:
                what = f"offers {each}, a name reserved for attnplug's own backend"
                raise _Rejected(what, PluginStatus.CONFLICT)
        if name in seen:
            raise _Rejected(f"offers {name} twice")
        seen.add(name)
        yield offer


def _part_faults(backend: type[AttentionBackend]) -> list[str]:
    """What the impl and the builder of a refused backend write that attnplug would not read, as far as it is known.

    An author then mends all in one round. Errors are left out: they are told once the backend itself is right.
    """
    parts = [guarded_call(getter)[0] for getter in (backend.get_impl_cls, backend.get_builder_cls)]
    # It imports torch, as the parts have done.
    from attnplug.core.interface.impl_and_builder import part_faults

    found, _ = guarded_call(part_faults, *parts)
    return found if all(isinstance(part, type) for part in parts) and found else []


def _backend_name(backend: Any, reads_parts: bool) -> str:
    # isinstance and issubclass would ask the value and its metaclass.
    if type not in mro_of(type(backend)) or AttentionBackend not in mro_of(backend):
        raise _Rejected(f"offers {shown(backend)}, which is not a subclass of AttentionBackend")
    title = class_name(backend)
    # Attributes of a class are read through its metaclass, so this comes before all others.
    if why := class_fault(backend, AttentionBackend):
        raise _Rejected(f"offers {title}, whose {why}")
    faults = backend_faults(backend, AttentionBackend)
    if inspect.isabstract(backend):
        missing = ", ".join(sorted(backend.__abstractmethods__))
        if not faults:
            raise _Rejected(f"offers {title}, which lacks {missing}")
        faults.insert(0, f"{title} lacks {missing}")
    if faults:
        faults += _part_faults(backend) if reads_parts else ()
        raise _Rejected(f"offers {title}, which does not follow the interface:{in_lines(faults)}")
    _, error = guarded_call(lambda: check_requirements(DECLARED["requires"](backend.requires)))
    if error is not None:
        raise _Rejected(f"offers {title}, whose requires cannot be read: {describe(error)}")
    name, error = guarded_call(backend.get_name)
    if error is not None:
        raise _Rejected(f"raised {describe(error)} in {title}.get_name")
    if guarded_call(plain_name, name)[1] is not None:
        raise _Rejected(f"names a backend {shown(name)}; {NAME_RULE}")
    _, error = guarded_call(declared, backend, "family")
    if error is not None:
        raise _Rejected(f"offers {name} of family {shown(backend.family)}, which is not a name; {NAME_RULE}")
    return str(name)
