"""One step of one layer against the oracle, as a function for tests and as the text of a test that calls it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from attnplug.core.backend import AttentionBackend
from attnplug.core.device import Device
from attnplug.core.errors import SpecError
from attnplug.core.spec import LayerSpec
from attnplug.registry.devices import DeviceLike, resolve_device
from attnplug.registry.plugins.options import build_options
from attnplug.testing.batches import StepArguments, direct_batch, paged_batch
from attnplug.testing.conformance.harness import Output, run_batch
from attnplug.testing.conformance.mistakes.deviation import Deviation, deviation
from attnplug.testing.conformance.mistakes.expectations import wrong_answer
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import Numbers

_FEW = 4
"""Equal lengths of more requests are one number."""


def _defaults(function: Any) -> dict[str, Any]:
    """The arguments of a function that may be left out, and what they then are."""
    given = inspect.signature(function).parameters.items()
    return {name: each.default for name, each in given if each.default is not inspect.Parameter.empty}


SPEC_DEFAULTS: Mapping[str, Any] = _defaults(LayerSpec)
"""The arguments of a LayerSpec that may be left out."""


def assert_step_correct(
    backend: type[AttentionBackend],
    spec: LayerSpec,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    device: DeviceLike = None,
    options: Any = None,
    config: Mapping[str, Any] | None = None,
    **drawn: Any,
) -> None:
    """Run one step of one layer, and compare its output and LSE with the float64 oracle.

    Keys and values are in pages of the backend, or come with the call if the layer has `direct_kv`. A failing
    conformance check prints its smallest failing step as a call of this function.

    Args:
        backend: the class.
        spec: the layer.
        query_lens: new tokens of each request.
        seq_lens: all tokens of each request, with the new ones.
        device: in a form that `attnplug.select` accepts; default the current device.
        options: a mapping or an instance of the backend's `Options`; default the defaults.
        config: fields of BuilderConfig.
        drawn: the other arguments of `paged_batch` or `direct_batch`, such as `block_size`, `numbers` and `seed`.

    Raises:
        ConformanceError: the numbers are wrong; the text names the rows, and the known mistake if there is one.
        CheckSkipped: the backend refuses the layer, or serves no such step; the text has the reasons.
    """
    # A test names the size of the numbers by its text.
    drawn |= {"numbers": Numbers(drawn.get("numbers", Numbers.PLAIN))}
    chosen = None if options is None else build_options(backend, options)
    target = Target(backend, resolve_device(device), options=chosen)
    target.require(spec)
    step = StepArguments(target, spec, tuple(query_lens), tuple(seq_lens), drawn, config or {})
    if wrong := wrong_step(step):
        raise wrong_answer(wrong.problem, None, wrong)


def wrong_step(step: StepArguments) -> Deviation | None:
    """The difference of the backend's answer to a step from the oracle's; None if they agree."""
    batch, target = step.batch(), step.target
    return deviation(
        batch, Output(*run_batch(target.backend, batch, options=target.own_options, **step.config))
    )


def step_test(step: StepArguments, mistake: str | None) -> str:
    """A test of a few lines that calls `assert_step_correct` for the step; its name has the known mistake."""
    target, spec = step.target, step.spec
    imports, backend = _backend_words(target.backend)
    words = re.sub(r"\W+", "_", (mistake or "smallest failing step").lower()).strip("_")
    plain = _defaults(direct_batch if spec.direct_kv else paged_batch)
    plain |= {"block_size": target.block_size(spec), "layout": target.backend.supported_kv_cache_layouts()[0]}
    plain["key_lens"] = list(step.seq_lens) if step.query_lens != step.seq_lens else None
    given: dict[str, Any] = {"query_lens": list(step.query_lens), "seq_lens": list(step.seq_lens)}
    given |= {name: each for name, each in step.options.items() if plain.get(name) != each}
    given |= {"config": dict(step.config)} if step.config else {}
    given |= {"device": target.device.type} if target.device != Device.current() else {}
    if target.own_options is not None:
        usual, own = type(target.own_options)(), dataclasses.fields(target.own_options)
        values = {field.name: getattr(target.own_options, field.name) for field in own if field.init}
        given["options"] = {name: each for name, each in values.items() if each != getattr(usual, name)}
    parts = {"LayerSpec": True, "MLADims": spec.mla is not None, "SparseSpec": spec.sparse is not None}
    names = ", ".join(name for name, is_needed in parts.items() if is_needed)
    lines = [
        imports,
        f"from attnplug.core import {names}",
        "from attnplug.testing import assert_step_correct",
    ]
    return "\n".join(
        [
            *sorted(lines, key=lambda line: (line.startswith("from"), line)),
            "",
            f"def test_{words}():",
            f"    layer = LayerSpec({_words(_spec_arguments(spec))})",
            f"    assert_step_correct({backend}, layer, {_words(given)})",
        ]
    )


def _backend_words(backend: type[AttentionBackend]) -> tuple[str, str]:
    """The line that imports a backend, and an expression for it."""
    module, name = backend.__module__, backend.__qualname__
    if getattr(sys.modules.get(module), name, None) is backend:
        return f"from {module} import {name}", name
    # A class that a function made, such as a composite, is known by its name in the registry.
    return "import attnplug", f'attnplug.list_backends()["{backend.get_name()}"]'


def _spec_arguments(spec: LayerSpec) -> dict[str, Any]:
    """The fewest arguments that make the layer."""
    given = {name: getattr(spec, name) for name in ("num_heads", "num_kv_heads", "head_size", *SPEC_DEFAULTS)}
    del given["sliding_window"]
    for name in SPEC_DEFAULTS:
        rest = {field: each for field, each in given.items() if field != name}
        with contextlib.suppress(SpecError):
            given = rest if LayerSpec(**rest) == spec else given
    return given


def _words(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_word(each)}" for name, each in given.items())


def _word(value: Any) -> str:
    if isinstance(value, str):
        # An enumeration prints its class, which the test does not import.
        return f'"{value}"'
    if isinstance(value, list) and len(value) > _FEW and len(set(map(repr, value))) == 1:
        return f"[{value[0]!r}] * {len(value)}"
    return repr(value)
