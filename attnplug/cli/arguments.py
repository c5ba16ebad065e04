"""Options shared by several commands, their parsing, and the completion of their values in a shell."""

from __future__ import annotations

import contextlib
import difflib
import enum
import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from attnplug.cli.output.output import echo
from attnplug.cli.output.own_output import set_quiet
from attnplug.core import kv_format
from attnplug.core.dtypes import DTYPES, dtype_name, kv_cache_dtype_name
from attnplug.core.errors import AttnplugError, PolicyError
from attnplug.core.features import Feature
from attnplug.core.spec import KINDS, Phase
from attnplug.registry.devices import is_here, resolve_device
from attnplug.registry.plugins.installed import AssumeInstalled
from attnplug.registry.plugins.options import parse_options
from attnplug.registry.selection.policy import parse_rules

if TYPE_CHECKING:
    from attnplug.registry.registry import SelectKwargs

_KINDS = (*KINDS, *map(str, Phase))


class Shell(enum.StrEnum):
    """A shell with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell.")]) -> None:
    """Print the script that completes commands, options, backends and devices in a shell."""
    import typer.completion

    make = getattr(typer.completion, "get_completion_script")  # noqa: B009  (typer does not export it for mypy)
    echo(make(prog_name="attnplug", complete_var="_ATTNPLUG_COMPLETE", shell=shell))


def complete_backends(incomplete: str) -> list[str]:
    """Names of backends and families."""
    return _from(_backend_names(), incomplete)


def complete_rules(incomplete: str) -> list[str]:
    """Rules of `--backend`: a name, or a kind or phase with a name; the last one of several."""
    before, comma, last = incomplete.rpartition(",")
    kind, equals, _ = last.partition("=")
    names = (
        [f"{kind}={name}" for name in _backend_names()]
        if equals
        else [*_backend_names(), *(f"{k}=" for k in _KINDS)]
    )
    return [f"{before}{comma}{each}" for each in _from(names, last)]


def complete_devices(incomplete: str) -> list[str]:
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


def complete_dtypes(incomplete: str) -> list[str]:
    """Dtypes of a layer."""
    return _from(DTYPES, incomplete)


def complete_kv_cache_dtypes(incomplete: str) -> list[str]:
    """Dtypes of KV caches."""
    return _from(kv_format.kv_cache_dtypes(), incomplete)


def complete_features(incomplete: str) -> list[str]:
    """Features of the matrix."""
    return _from(["plain", *(name for flag in Feature for name in flag.names())], incomplete)


def _backend_names() -> list[str]:
    from attnplug.registry.default import get_registry

    # A plugin that prints must not complete a word, and a wrong variable must not print over the prompt.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            return sorted(get_registry().plugins.names)
        except AttnplugError:
            return []


def _from(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


_choice = functools.partial(typer.Option, rich_help_panel="Which backends")

ConfigPath: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="A Hugging Face config.json, its folder, or a hub name whose file is in the local cache.",
    ),
]
TensorParallel: TypeAlias = Annotated[
    int, typer.Option("--tp", "--tensor-parallel-size", min=1, metavar="N", help="Tensor-parallel size.")
]
DeviceText: TypeAlias = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        autocompletion=complete_devices,
        help="Target device: current, cpu, H100, RTX 4090, sm90, ...",
    ),
]


def _given_rules(text: str | None) -> str | None:
    # A script whose variable is not set gives an empty text, which must not mean the default.
    if text is not None and not text.strip():
        raise PolicyError("--backend", text, "names no backend", "leave --backend out to choose by priority")
    return text


BackendRules: TypeAlias = Annotated[
    str | None,
    _choice(
        "--backend",
        metavar="RULES",
        callback=_given_rules,
        autocompletion=complete_rules,
        help="One backend, or rules by layer name, kind or phase: 'TORCH,sliding=TRITON'.",
    ),
]
PhaseChoice: TypeAlias = Annotated[
    Phase | None, _choice("--phase", help="Choose for prefill or decode alone; by default for both.")
]

# A search for near names finds another dtype for these short ones, or none.
_SHORT = {"half": "float16", "fp16": "float16", "f16": "float16", "float": "float32", "fp32": "float32"}


def _known_kv_cache_dtype(text: str) -> str:
    """`text`; PolicyError if no engine and no loaded backend has such a dtype."""
    if kv_cache_dtype_name(text, "--kv-cache-dtype") in kv_format.kv_cache_dtypes():
        return text
    from attnplug.registry.default import get_registry

    known = dict.fromkeys(kv_format.kv_cache_dtypes())
    for offer in get_registry().plugins.offers:
        known |= dict.fromkeys(kv_format.with_codecs(map(str, offer.declared.supported_kv_cache_dtypes)))
    if kv_cache_dtype_name(text) in known:
        return text
    asked = text.strip().lower()
    exact = asked if asked in known else _SHORT.get(asked)
    near = [exact] if exact else difflib.get_close_matches(asked, known, 2)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
    raise PolicyError("--kv-cache-dtype", text, "is an unknown dtype", remedy)


KVCacheDtype: TypeAlias = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        metavar="DTYPE",
        help=f"Cache storage: {', '.join(kv_format.common_kv_cache_dtypes(aliases=True))}, ...",
        callback=_known_kv_cache_dtype,
        autocompletion=complete_kv_cache_dtypes,
    ),
]


def _known_dtype(text: str | None) -> str | None:
    return None if text is None else dtype_name(_SHORT.get(text.strip().lower(), text), "--dtype")


ModelDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="float16, bfloat16 or float32. \\[default: the dtype in CONFIG, or bfloat16]",
        callback=_known_dtype,
        autocompletion=complete_dtypes,
    ),
]
BlockSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--block-size", metavar="TOKENS", help="Tokens per KV block; by default the backend chooses."
    ),
]
AssumedVersions: TypeAlias = Annotated[
    list[str] | None,
    _choice(
        "--assume-installed",
        metavar="all|here|DIST=VERSION",
        help="Choose as if these were installed; may be repeated. \\[default: here on this machine, all for another]",
    ),
]
AllowRefuted: TypeAlias = Annotated[
    list[str] | None,
    _choice(
        "--allow-refuted",
        metavar="all|NAMES",
        help="Allow these backends despite wrong results on this machine; may be repeated.",
    ),
]
TunedFile: TypeAlias = Annotated[
    str | None,
    _choice(
        "--tuned", metavar="FILE", help="Rank by the measured times in this file, which attnplug tune wrote."
    ),
]
NoTuned: TypeAlias = Annotated[bool, _choice("--no-tuned", help="Rank without measured times.")]
OptionTexts: TypeAlias = Annotated[
    list[str] | None,
    _choice(
        "--option",
        metavar="NAME.OPTION=VALUE",
        help="Set an option of a backend; may be repeated. Leave NAME. out if --backend names one backend.",
    ),
]
Quiet: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", callback=set_quiet, help="Print only the result and errors.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# The timers of the operating system take no infinity.
MOST_SECONDS = 7 * 24 * 3600.0
"""The longest time limit."""
_MOST_JOBS = 256


def timeout_option(panel: str, text: str) -> Any:
    """`--timeout` in seconds, with its help text."""
    return typer.Option(min=0.1, max=MOST_SECONDS, metavar="SECONDS", help=text, rich_help_panel=panel)


def jobs_option(panel: str) -> Any:
    """`--jobs` of commands that run workers."""
    text = "Worker processes \\[default: one per core; 2 on a GPU]"
    return typer.Option(min=1, max=_MOST_JOBS, metavar="N", help=text, rich_help_panel=panel)


def memory_option(panel: str) -> Any:
    """`--memory` of commands that run workers."""
    text = "Limit of each worker, such as 4GiB \\[default: on a CPU, its share of the machine]"
    return typer.Option(metavar="BYTES", help=text, rich_help_panel=panel)


def settings(
    backend: str | None,
    option: Sequence[str] | None,
    assume_installed: Sequence[str] | None,
    allow_refuted: Sequence[str] | None,
    tuned: str | None,
    no_tuned: bool,
    device: str,
) -> SelectKwargs:
    """The settings of a selection in the options of a command.

    A device that is not of this machine has every library that it could have, unless the user says which.

    Raises:
        PolicyError: text of another form, a distribution that no backend requires, or both `--tuned` and `--no-tuned`.
    """
    options = None
    if option:
        rules = parse_rules(backend, "--backend")
        options = parse_options(option, "--option", rules[0].backend if len(rules) == 1 else None)
    assumed = _assumed(assume_installed)
    if not assume_installed and not is_here(resolve_device(device)):
        assumed = "all"
    if no_tuned and tuned is not None:
        raise PolicyError("--tuned", tuned, "cannot be combined with --no-tuned", "give one of the two")
    return {
        "backend": backend,
        "options": options,
        "assume_installed": assumed,
        "allow_refuted": ",".join(allow_refuted) if allow_refuted else None,
        "tuned": False if no_tuned else tuned,
    }


def _assumed(given: Sequence[str] | None) -> AssumeInstalled:
    """The versions in `--assume-installed`.

    Raises:
        PolicyError: text of another form, or a distribution that no backend requires and that is not installed.
    """
    if not given or list(given) == ["here"]:
        return None
    if list(given) == ["all"]:
        return "all"
    versions = {}
    for part in (part for text in given for part in text.split(",")):
        name, equals, version = part.partition("=")
        if not (name and equals and version):
            raise PolicyError("--assume-installed", part, "must be all, here, or DISTRIBUTION=VERSION")
        versions[name.strip()] = version.lstrip("=").strip()
    _check_distributions(versions)
    return versions


def _check_distributions(names: Iterable[str]) -> None:
    """PolicyError for a distribution that no backend requires and that is not installed."""
    # It would change no answer; such a name is often a module's in place of its distribution's.
    from attnplug.registry.default import get_registry
    from attnplug.registry.plugins.installed import installed_version, requirement_names
    from attnplug.registry.plugins.records import canonical_name

    offers = get_registry().plugins.offers
    known = {canonical_name(each) for offer in offers for each in requirement_names(offer.declared.requires)}
    for name in names:
        if canonical_name(name) not in known and installed_version(name) is None:
            near = difflib.get_close_matches(name, sorted(known), 3)
            meant = f"did you mean {' or '.join(near)}?"
            remedy = meant if near else f"they require {', '.join(sorted(known))}"
            limit = "is a distribution that no backend requires"
            raise PolicyError("--assume-installed", name, limit, remedy)
