"""Imports a kernel library after a check that its file belongs to the required distribution.

Distributions may share a package folder: `flash-attn` and `flash-attn-4` share `flash_attn`, so `import flash_attn`
proves neither. The check looks the file up in the distributions' records of installed files.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from urllib.parse import urlparse
from urllib.request import url2pathname

from attnplug.backends.libraries import LIBRARY_RULES, LibraryRule, rules_of
from attnplug.core.errors import BackendUnavailableError


def import_library(backend: str) -> ModuleType:
    """The module whose functions a backend calls.

    Raises:
        BackendUnavailableError: it is missing, belongs to another distribution, or its import raised; the
            text says which and what to do.
    """
    rule = next(rule for rule in rules_of(backend) if rule.serves)
    problem = problem_of(rule)
    if problem is not None:
        raise BackendUnavailableError(problem)
    parent = rule.module.partition(".")[0]
    with warnings.catch_warnings():
        # Under `-W error` a library's own warning must not make it unusable.
        warnings.simplefilter("default")
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in (parent, rule.module):
            try:
                importlib.import_module(name)
            except Exception as error:
                raise BackendUnavailableError(_import_failed(rule, name, error)) from error
    return sys.modules[rule.module]


def problem_of(rule: LibraryRule) -> str | None:
    """Why the import would not give the distribution that `rule` names, and the remedy; None if it would.

    Nothing is imported.
    """
    try:
        required = importlib.metadata.distribution(rule.distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{rule.distribution} is not installed; pip install '{rule.distribution}{rule.versions}'"
    name = f"{rule.distribution} {required.version}"
    file = _file_of(rule.module)
    if file is None:
        where = _file_of(rule.module.partition(".")[0])
        seen = "" if where is None else f": the package comes from {where.parent}"
        return f"{rule.module} of {name} is not where Python looks for it{seen}; {_reinstall(rule)}"
    claim = _claim(required, file)
    if claim is True or _is_editable(required, file):
        return None
    others = [
        f"{other.metadata['Name']} {other.version}"
        for other in _relatives(rule)
        if _claim(other, file) is not None
    ]
    if claim is None:
        owner = others[0] if others else "no installed FlashAttention or FlashInfer"
        return f"{file} belongs to {owner}, not to {name}; {_reinstall(rule)}"
    if others:
        return f"{file} is not the one of {name}: {others[0]} has written over it; {_reinstall(rule)}"
    return None  # the user changed the file by hand


def _file_of(module: str) -> Path | None:
    """The file that importing `module` would run; None where there is none. Nothing is imported."""
    path: Iterable[str] | None = None
    found: importlib.machinery.ModuleSpec | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        found = _spec_of(name, None if path is None else list(path))
        if found is None:
            return None
        path = found.submodule_search_locations
    if found is not None and found.origin is None and path is not None:
        folders = list(path)  # a package without __init__.py
        return Path(folders[0]) / "__init__.py" if folders else None
    return None if found is None or found.origin is None else Path(found.origin)


def _spec_of(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    if name.count(".") and path is None:
        return None  # its parent is a module, not a package
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            found = None if find is None else find(name, path)
        except KeyError:
            # A finder of folders without __init__.py needs the parent in sys.modules, which is not imported.
            found = importlib.machinery.ModuleSpec(name, None, is_package=True)
            part = name.rpartition(".")[2]
            folders = [Path(each) / part for each in path or ()]
            found.submodule_search_locations = [str(each) for each in folders if each.is_dir()]
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None


def _claim(distribution: importlib.metadata.Distribution, file: Path) -> bool | None:
    """Whether `file` is as the distribution installed it; None where it did not install it.

    A distribution without records is taken to own what it requires.
    """
    if distribution.files is None:
        return True
    target = file.resolve()
    for recorded in distribution.files:
        if recorded.name == file.name and Path(str(distribution.locate_file(recorded))).resolve() == target:
            if recorded.hash is None:
                return True
            digest = hashlib.new(recorded.hash.mode, file.read_bytes()).digest()
            return recorded.hash.value == base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    return None


def _is_editable(distribution: importlib.metadata.Distribution, file: Path) -> bool:
    """Whether the distribution is installed in place, and the file lies in its folder."""
    text = distribution.read_text("direct_url.json")
    if text is None:
        return False
    source = json.loads(text)
    if not source.get("dir_info", {}).get("editable"):
        return False
    folder = Path(url2pathname(urlparse(source["url"]).path)).resolve()
    return folder in file.resolve().parents


def _relatives(rule: LibraryRule) -> list[importlib.metadata.Distribution]:
    """The other kernel libraries that are installed."""
    found = []
    for name in dict.fromkeys(each.distribution for each in LIBRARY_RULES):
        if name == rule.distribution:
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(importlib.metadata.distribution(name))
    return found


def _import_failed(rule: LibraryRule, name: str, error: Exception) -> str:
    version = importlib.metadata.version(rule.distribution)
    raised = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    torch = importlib.metadata.version("torch")
    file = None if name == rule.module else _file_of(name)
    if file is not None and file.exists():
        others = [other for other in _relatives(rule) if _claim(other, file) is not None]
        if others:
            other = f"{others[0].metadata['Name']} {others[0].version}"
            remedy = f"pip uninstall {others[0].metadata['Name']}, or install a build of it for torch {torch}"
            return f"{rule.distribution} {version} lies in the package {name} of {other}, which {raised}; {remedy}"
    return (
        f"importing {name} of {rule.distribution} {version} {raised}; install a build of it for torch {torch}"
    )


def _reinstall(rule: LibraryRule) -> str:
    return f"pip install --force-reinstall --no-deps '{rule.distribution}{rule.versions}'"
