"""Importing a backend's module and calling its class methods load no torch and no kernel library."""

from __future__ import annotations

import importlib.metadata
import json
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from attnplug._system import files
from attnplug._system.processes import Child, python_command
from attnplug.core.backend import AttentionBackend
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.target import Target

_HEAVY = (
    "torch triton jax jaxlib tensorflow transformers vllm xformers cupy tilelang cutlass "
    "flash_attn flash_attn_interface flash_attn_2_cuda flashinfer sageattention"
)
_SECONDS = 120
_MOST_BYTES = 1 << 26
_CHILD = "from attnplug.testing.conformance.process.lightness_child import main; main(*sys.argv[1:])"


def checks(target: Target) -> Iterator[Check]:
    """The checks of the module, each in child processes with the same import path."""
    for name, call_methods, summary in (
        ("light-import", False, "importing the module loads no torch and no kernel library"),
        ("light-methods", True, "calling all declaring methods of the class loads none either"),
    ):
        yield Check.of(f"declaration/{name}", summary, _check, target, call_methods)
    summary = "importing the module and calling the declaring methods changes nothing in the process"
    yield Check.of("declaration/no-effects", summary, _check_effects, target)
    summary = "importing the impl and the builder changes nothing in the process"
    yield Check.of("declaration/no-effects-of-parts", summary, _check_parts, target)
    summary = "the declaring methods give the same answers in each process"
    yield Check.of("declaration/each-process", summary, _check_processes, target)


def _check(target: Target, call_methods: bool) -> None:
    answer = _ask(target.backend, call_methods=call_methods)
    module = target.backend.__module__
    found: dict[str, str] = answer["loaded"]
    if found:
        what = ", ".join(f"{each} ({where})" if where else each for each, where in found.items())
        did = "calling the methods of the class" if call_methods else f"importing {module}"
        raise ConformanceError(f"{did} loads {what}; move that behind get_impl_cls and get_builder_cls")
    if answer["raised"]:
        raise ConformanceError(
            f"calling the methods of the class, in a process without torch, raised {answer['raised']}"
        )


def _check_effects(target: Target) -> None:
    effects: list[str] = _ask(target.backend, call_methods=True, effects=True)["effects"]
    if effects:
        did = f"importing {target.backend.__module__} or calling the declaring methods of the class"
        raise ConformanceError(f"{did} {'; '.join(effects)}; a declaration must leave the process as it is")


def _check_parts(target: Target) -> None:
    effects: list[str] = _ask(target.backend, call_methods=False, parts=True)["parts"]
    if effects:
        raise ConformanceError(
            f"the import of the impl or the builder {'; '.join(effects)}; a backend must leave the process as it is"
        )


def _check_processes(target: Target) -> None:
    # Another seed gives other hashes of text, as each process of an engine has them.
    one, other = (
        _ask(target.backend, call_methods=True, effects=True, hash_seed=seed)["values"] for seed in (1, 2)
    )
    for name in sorted(one.keys() - {"compile_key"}):
        for value, another in zip(one[name], other[name], strict=True):
            if value != another:
                raise ConformanceError(
                    f"{name} is {value} in one process and {another} in another; all ranks must agree"
                )


def _ask(backend: type[AttentionBackend], hash_seed: int | None = None, **asked: bool) -> dict[str, Any]:
    """The answer of a child process that imports the backend's module."""
    module, name = _home(backend)
    watched = [*_HEAVY.split(), *_required_modules(backend.requires)]
    request = {"module": module, "name": name, "watched": watched, **asked}
    hashes = {} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)}
    with Child(python_command(_CHILD), request, {**os.environ, **hashes}) as child:
        problem = child.problem(_SECONDS)
        told = files.read_tail(child.report, _MOST_BYTES)
    if problem is not None:
        raise ConformanceError(f"importing {module} in a child process {problem}")
    if not told:
        raise ConformanceError(f"importing {module} ended the child process before it could answer")
    answer: dict[str, Any] = json.loads(told)
    return answer


def _home(backend: type[AttentionBackend]) -> tuple[str, str]:
    """The module and qualified name of the class; CheckSkipped if no other process can import it."""
    module, name = backend.__module__, backend.__qualname__
    loaded = sys.modules.get(module)
    try:
        is_there = loaded is not None and operator.attrgetter(name)(loaded) is backend
    except AttributeError:
        is_there = False
    last = module.rpartition(".")[2]
    if module == "__main__" or not is_there:
        raise CheckSkipped(f"{module}.{name} cannot be imported by another process: it was made here")
    if last == "conftest" or last.startswith("test_") or last.endswith("_test"):
        raise CheckSkipped(f"{module} is a test module, which may import anything")
    return module, name


def _required_modules(requires: Sequence[str | tuple[str, ...]]) -> list[str]:
    """Modules of the required distributions."""
    # A backend's module must load without them, to say what is missing.
    names = set()
    for entry in requires:
        for each in (entry,) if isinstance(entry, str) else entry:
            try:
                names.add(canonicalize_name(Requirement(each).name))
            except InvalidRequirement:
                continue  # reported by "declaration/requires"
    distributions = importlib.metadata.packages_distributions() if names else {}
    return sorted(
        module
        for module, owners in distributions.items()
        if names & {canonicalize_name(owner) for owner in owners}
    )
