"""Shell completion: the values of options and arguments, and `attnplug completion`, which prints the script."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from attnplug.cli.output.output import echo
from attnplug.core import kv_format
from attnplug.core.dtypes import DTYPES
from attnplug.core.errors import AttnplugError
from attnplug.core.features import Feature
from attnplug.core.spec import KINDS, Phase

_KINDS = (*KINDS, *map(str, Phase))


class Shell(enum.StrEnum):
    """A shell with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
) -> None:
    """Print the script that completes commands, options, backends and devices in a shell."""
    import typer.completion

    make = getattr(typer.completion, "get_completion_script")  # noqa: B009  (typer does not export it for mypy)
    echo(make(prog_name="attnplug", complete_var="_ATTNPLUG_COMPLETE", shell=shell))


def backends(incomplete: str) -> list[str]:
    """Names of backends and families."""
    return _from(_names(), incomplete)


def rules(incomplete: str) -> list[str]:
    """Rules of `--backend`: a name, or a kind or phase with a name; the last one of several."""
    before, comma, last = incomplete.rpartition(",")
    kind, equals, _ = last.partition("=")
    names = [f"{kind}={name}" for name in _names()] if equals else [*_names(), *(f"{k}=" for k in _KINDS)]
    return [f"{before}{comma}{each}" for each in _from(names, last)]


def devices(incomplete: str) -> list[str]:
    """Devices: types, architectures and GPUs by name, without blanks."""
    from attnplug.core.device import gpu_models

    gpus = gpu_models()
    names = [model.name.lower().replace(" ", "") for model in gpus]
    archs = [model.arch for model in gpus if model.arch.startswith("sm")]
    found = _from(["current", "cpu", "cuda", "rocm", "mps", "xpu", *archs, *names], incomplete.lower())
    # A shell keeps only words that begin as the typed text does.
    if incomplete.isupper():
        return [name.upper() for name in found]
    return [f"{incomplete}{name[len(incomplete) :]}" for name in found]


def dtypes(incomplete: str) -> list[str]:
    """Dtypes of a layer."""
    return _from(DTYPES, incomplete)


def kv_cache_dtypes(incomplete: str) -> list[str]:
    """Dtypes of KV caches."""
    return _from(kv_format.kv_cache_dtypes(), incomplete)


def features(incomplete: str) -> list[str]:
    """Features of the matrix."""
    return _from(["plain", *(name for flag in Feature for name in flag.names())], incomplete)


def levels(incomplete: str) -> list[str]:
    """Levels of conformance."""
    return _from(["smoke", "full"], incomplete)


def _names() -> list[str]:
    from attnplug.registry.default import get_registry

    # A plugin that prints must not complete a word, and a wrong variable must not print over the prompt.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return sorted(get_registry().plugins.names)
        except AttnplugError:
            return []


def _from(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
