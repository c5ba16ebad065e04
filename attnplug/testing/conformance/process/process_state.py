"""A backend leaves the settings of the process as they are, and gives the same answers under other settings."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import torch

from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import (
    BatchFactory,
    layers_of_each_feature,
    mixed_lengths,
    scenario_factory,
    scenarios,
)
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    ConformanceError,
    checks_from,
    error_context,
)
from attnplug.testing.conformance.harness import Harness, blank_output, layer_words
from attnplug.testing.conformance.layer_names import layer_names
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.process.process_files import watched_files
from attnplug.testing.conformance.process.process_settings import (
    lasting_changes,
    read_settings,
    restore_settings,
    unusual_settings,
)
from attnplug.testing.conformance.process.torch_settings import change_of
from attnplug.testing.conformance.target import Target

_Context: TypeAlias = Callable[[Target], AbstractContextManager[object]]


def kept_checks(target: Target) -> Iterator[Check]:
    """The checks of settings, of the layers of each scenario and of each feature."""
    for scenario in scenarios(target):
        yield from checks_from({"settings-kept": (_check_kept, _KEPT)}, "state", target, scenario)
    yield Check.of(
        "state/settings-kept-layers", f"{_KEPT}, for layers of each feature", _check_layers, target
    )


def checks(target: Target) -> Iterator[Check]:
    """The check of each setting that an engine may have made."""
    for name, (context, begin, summary) in _GIVEN.items():
        yield Check.of(f"state/{name}", summary, _check_given, target, name, context, begin)


_KEPT = "no method of the backend changes a setting of the process or leaves a file"


def _check_kept(target: Target, scenario: str) -> None:
    batch = scenario_factory(target, scenario)()
    compiles = target.backend.compile_key(batch.spec) is not None
    _expect_none(_changes(functools.partial(_life, target, batch), slow=not compiles))


def _check_layers(target: Target) -> None:
    found: list[str] = []
    for spec in layers_of_each_feature(target):
        with contextlib.suppress(CheckSkipped):
            batch = target.batch(spec, *mixed_lengths(target.block_size(spec)))
            changes = _changes(functools.partial(_step, target, batch), slow=False)
            found += [f"{change} ({layer_words(spec)})" for change in changes]
    _expect_none(found)


def _expect_none(changes: list[str]) -> None:
    if changes:
        raise ConformanceError(
            f"{'; '.join(dict.fromkeys(changes))}; a backend must leave the process as it is"
        )


def _changes(run: Callable[[], Generator[str, None, None]], slow: bool) -> list[str]:
    """What the parts of `run` change, first as the process is, then under other settings, also `slow` ones."""
    found = [f"a call before this check changes {change}" for change in lasting_changes()]
    excused: dict[Any, Any] = {}
    with watched_files() as watch:
        before = read_settings()
        for is_first in (True, False):
            parts = run()
            try:
                if not is_first:
                    # Else a setting that an earlier call made would have its value already.
                    unusual_settings(slow)
                last, loaded = read_settings(), set(sys.modules)
                for part in parts:
                    now = read_settings()
                    for setting, value in now.items():
                        if value == last[setting]:
                            continue
                        # The second run shows whether the library that was imported or the backend changes it.
                        if is_first and setting.by_imports and set(sys.modules) - loaded:
                            excused[setting] = value
                            continue
                        found.append(f"{part} changes {change_of(setting, last[setting], value)}")
                    found += [f"{part} {did}" for did in watch.found(is_again=not is_first)]
                    loaded, last = set(sys.modules), now
            finally:
                parts.close()
                restore_settings(before)
    restore_settings(excused)
    return found


def _step(target: Target, batch: Batch) -> Generator[str, None, None]:
    """Make a layer and its builder, and run a step and a draft model's; yields what ran."""
    target.backend.for_layer(batch.spec)
    yield "for_layer"
    harness = Harness.of(target, batch, num_speculative_tokens=2)
    yield "the making of a layer and its builder"
    metadata = harness.build(batch)
    yield "build"
    harness.run(batch, metadata)
    yield "forward"
    with error_context("build_for_drafting"):
        harness.run(batch, harness.builder.build_for_drafting(batch.common, 1))
    yield "a step of a draft model"


def _life(target: Target, batch: Batch) -> Generator[str, None, None]:
    """Run the methods of a layer and its builder; yields the name of each after it ran."""
    target.reasons(batch.spec)
    yield "validate_configuration"
    backend = target.backend.for_layer(batch.spec)
    yield "for_layer"
    impl_cls, _ = backend.get_impl_cls(), backend.get_builder_cls()
    yield "the import of the impl or the builder"
    options = target.own_options
    if options is None and backend.Options is not None:
        options = backend.Options()
    given: dict[str, Any] = {"tensors": batch.tensors, "options": options}
    with error_context("from_spec"):
        impl = impl_cls.from_spec(
            batch.spec, backend=backend, layer_name=layer_names(1, batch.spec)[0], **given
        )
    yield "from_spec"
    with error_context("process_weights_after_loading"):
        impl.process_weights_after_loading(getattr(torch, batch.spec.dtype))
    yield "process_weights_after_loading"
    harness = Harness.of(target, batch)
    yield "the builder's constructor"
    builder, spec = harness.builder, batch.spec
    with error_context("use_cascade_attention"):
        lens = np.diff(batch.common.query_start_loc_cpu.numpy())
        builder.use_cascade_attention(
            *(0, lens, spec.num_heads, spec.num_kv_heads, spec.has_alibi, False, False, 1, 1)
        )
    yield "use_cascade_attention"
    builds: dict[str, Callable[[], object]] = {
        "build": lambda: builder.build(0, batch.common),
        "build with fast_build=True": lambda: builder.build(0, batch.common, True),
        "build_for_drafting": lambda: builder.build_for_drafting(batch.common, 0),
    }
    for name, build in builds.items():
        with error_context(name):
            build()
        yield name
    if batch.kv_cache is not None:
        harness.write(batch)
        yield "update_kv_cache"
    harness.attend(batch)
    yield "attend"
    harness.forward(batch)
    yield "forward"
    metadata, query = harness.build(batch), batch.query
    tensors = query, batch.key, batch.value, batch.kv_cache, metadata
    # The layer declares no LSE; one that runs instead fails another check.
    lse = torch.zeros(query.shape[0], spec.num_heads, dtype=torch.float32, device=query.device)
    guarded_call(harness.impl.forward, harness.layers[0], *tensors, output_lse=lse)
    yield "a forward that is refused"


def _check_given(target: Target, name: str, context: _Context, begin: str) -> None:
    """Run two steps under `context`, which begins before the "run", before the layer is "made", or before "all"."""
    for scenario, make in _scenarios(target):
        what = f"{name}, {scenario} batch"
        with contextlib.ExitStack() as given:
            if begin == "all":
                given.enter_context(context(target))
            batch = make()
            outputs = [blank_output(batch), blank_output(batch)]
            if begin == "made":
                given.enter_context(context(target))
            harness = Harness.of(target, batch)
            if begin == "run":
                given.enter_context(context(target))
            for into in outputs:
                harness.forward(batch, into, what)
        for into in outputs:
            expect_correct(batch, into, what)
            for part, tensor in (("output", into.output), ("the cache", batch.kv_cache)):
                if tensor is not None and tensor.requires_grad:
                    raise ConformanceError(
                        f"{what}: {part} requires grad, so the graph of every step is kept"
                    )


def _scenarios(target: Target) -> Iterator[tuple[str, BatchFactory]]:
    for scenario in scenarios(target):
        make = scenario_factory(target, scenario)
        yield scenario, make
        if target.backend.compile_key(make().spec) is not None:
            # Compiled kernels are compiled again under other settings.
            return


@contextlib.contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _leave_unfilled() -> Iterator[None]:
    """torch.empty gives NaN and the largest integers."""
    # Fresh memory is often zero, which hides elements that a backend never writes.
    before = torch.get_deterministic_debug_mode()
    switch: Any = torch.utils.deterministic
    fills = switch.fill_uninitialized_memory
    with warnings.catch_warnings():
        # Kernels without a deterministic form warn here, and run.
        warnings.simplefilter("ignore")
        # torch.use_deterministic_algorithms does this too, after an import of the compiler.
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(before > 0, warn_only=before == 1)
            switch.fill_uninitialized_memory = fills


_GIVEN: dict[str, tuple[_Context, str, str]] = {
    "no-grad": (lambda target: torch.no_grad(), "run", "a layer runs under torch.no_grad"),
    "grad": (
        lambda target: torch.enable_grad(),
        "made",
        "with gradients enabled, outputs and caches have no graph",
    ),
    "inference-mode": (
        lambda target: torch.inference_mode(),
        "run",
        "a layer that is made outside runs under torch.inference_mode",
    ),
    "all-in-inference-mode": (
        lambda target: torch.inference_mode(),
        "all",
        "a layer is made and run under torch.inference_mode",
    ),
    "default-dtype-float64": (
        lambda target: _dtype(torch.float64),
        "made",
        "a default dtype of float64 changes no answer",
    ),
    "default-dtype-bfloat16": (
        lambda target: _dtype(torch.bfloat16),
        "made",
        "a default dtype of bfloat16 changes no answer",
    ),
    "default-device": (
        lambda target: torch.device(target.torch_device),
        "made",
        "the layer's device as the default device changes no answer",
    ),
    "three-threads": (
        lambda target: _threads(3),
        "made",
        "another number of threads of torch changes no answer",
    ),
    "uninitialised-memory": (
        lambda target: _leave_unfilled(),
        "made",
        "an answer does not depend on what uninitialised memory contains",
    ),
}
"""By name: the context, what it begins before (see `_check_given`), and the summary."""
