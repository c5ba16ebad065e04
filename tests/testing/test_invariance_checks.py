"""The checks of `invariance` find bits that depend on the step, name the request, and pass what keeps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core.features import Feature
from attnplug.registry.devices import resolve_device
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, Level
from attnplug.testing.conformance.numbers import invariance
from attnplug.testing.conformance.target import Target

Depends = Callable[[Any, Any], bool]


def keeps(*words: str, impl: type[TorchImpl], name: str = "KEEPS") -> type[TorchBackend]:
    """TORCH with another impl, which declares `words`."""

    class Backend(TorchBackend):
        supported_invariances: ClassVar[Sequence[str]] = words

        @staticmethod
        def get_name() -> str:
            return name

        @classmethod
        def get_impl_cls(cls) -> type[TorchImpl]:
            return impl

    return Backend


def depending(depends: Depends) -> type[TorchImpl]:
    """An impl whose bits are others, by the last one, in steps of which `depends` says so."""

    class Impl(TorchImpl):
        def _attend_call(self, *given: Any) -> None:
            *_, metadata, output, lse, _ = given
            _in_rows(self, *given)
            if depends(metadata, self.spec):
                output.copy_(torch.nextafter(output, output.new_tensor(torch.inf)))
                if lse is not None:
                    lse.copy_(torch.nextafter(lse, lse.new_tensor(torch.inf)))

    return Impl


def _in_rows(impl: TorchImpl, layer: Any, query: Any, *given: Any) -> None:
    """Each row as a step of its own, so that rows depend on nothing but their keys."""
    key, value, cache, metadata, output, lse, use_sinks = given
    for rows, own, alone in metadata.alone():
        count = rows.stop - rows.start
        first = int(alone.seq_lens[0]) - count
        for row in range(count):
            # The keys given with the call are those of the request; a row sees those up to its own.
            paged = cache is not None
            step = dataclasses.replace(
                alone,
                num_actual_tokens=1,
                query_starts=np.array([0, 1]),
                seq_lens=alone.seq_lens if impl.spec.attn_type != "decoder" else np.array([first + row + 1]),
                key_starts=None if paged else np.array([0, row + 1]),
                plans={},
            )
            place = slice(rows.start + row, rows.start + row + 1)
            part = None if lse is None else torch.empty_like(lse[place])
            into = torch.empty_like(output[place])
            keys = [None if paged or each is None else each[own][: row + 1].clone() for each in (key, value)]
            TorchImpl._attend_step(
                impl, layer, query[place].clone(), *keys, cache, step, into, part, use_sinks
            )
            output[place] = into
            if lse is not None:
                lse[place] = part


def checks(backend: type[TorchBackend]) -> dict[str, Check]:
    target = Target(backend, resolve_device("cpu"), Level.SMOKE, None)
    return {check.id: check for check in invariance.checks(target)}


def failures(backend: type[TorchBackend], pattern: str) -> list[str]:
    """The texts of the checks whose id begins with `pattern` and that fail."""
    found = []
    for name, check in checks(backend).items():
        if not name.startswith(f"invariance/{pattern}"):
            continue
        try:
            check()
        except ConformanceError as problem:
            found.append(str(problem))
        except CheckSkipped:
            continue
    return found


def test_torch_keeps_the_bits_of_a_batch_for_each_feature() -> None:
    assert failures(TorchBackend, "") == []
    named = set(checks(TorchBackend))
    assert {
        f"invariance/batch-{name}" for name in ("plain", "sinks", "sparse", "lse", "cross", "bfloat16", "HND")
    } <= named
    assert not any("rows" in name or "heads" in name for name in named)


class Together(TorchImpl):
    """TORCH without the words: decodes are padded to the longest of a group."""

    def _attend_call(self, *given: Any) -> None:
        self._attend_step(*given)


def test_what_torch_does_without_the_words_is_found_and_one_neighbour_named() -> None:
    found = failures(keeps("batch", impl=Together), "batch-")
    # Of seven layers: on some processors, the products of three do not depend on the padding.
    assert len(found) >= 4
    assert any("numbers of the output have other bits" in text for text in found)
    assert any(
        "beside request " in text and " alone, decodes of almost equal length" in text for text in found
    )


MISTAKES: dict[str, tuple[str, str, Depends]] = {
    "cuts by the keys of all requests": ("batch", "plain", lambda meta, spec: meta.seq_lens.sum() % 3 == 1),
    "tiles by the longest query": ("batch", "plain", lambda meta, spec: meta.query_lens.max() > 16),
    "splits by the longest sequence": ("batch", "plain", lambda meta, spec: meta.seq_lens.max() > 140),
    "splits by the width of the table": (
        "batch",
        "plain",
        lambda meta, spec: meta.block_table.shape[1] % 2 == 1,
    ),
    "order of requests": ("batch", "plain", lambda meta, spec: meta.seq_lens[0] > meta.seq_lens[-1]),
    "number of requests": ("batch", "plain", lambda meta, spec: meta.seq_lens.size % 2 == 0),
    "places of pages": ("batch", "plain", lambda meta, spec: int(meta.block_table[0, 0]) % 2 == 0),
    "own keys only if all requests are new": (
        "batch",
        "plain",
        lambda meta, spec: bool((meta.query_lens == meta.seq_lens).all()),
    ),
    "forgotten for windows": (
        "batch",
        "sliding_window",
        lambda meta, spec: spec.is_windowed and meta.seq_lens.size > 1,
    ),
    "the LSE's own route": ("batch", "lse", lambda meta, spec: spec.needs_lse and meta.seq_lens.size > 2),
    "decodes and prompts in two kernels": ("rows", "plain", lambda meta, spec: meta.query_lens.max() == 1),
    "drafts in a kernel of their own": ("rows", "plain", lambda meta, spec: 1 < meta.query_lens.max() <= 8),
    "tiles that begin at the first new token": (
        "rows",
        "plain",
        lambda meta, spec: bool((meta.seq_lens - meta.query_lens)[0] % 64),
    ),
    "programs by KV heads": ("heads", "plain", lambda meta, spec: spec.num_kv_heads > 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bits_that_depend_on_the_step_are_found(mistake: str) -> None:
    word, layer, depends = MISTAKES[mistake]
    backend = keeps(word, impl=depending(depends))
    found = failures(backend, f"{word}-{layer}")
    assert len(found) == 1
    assert found[0].startswith(f"invariance {word}: request ")


def test_rows_that_depend_on_their_keys_alone_keep_all_words() -> None:
    backend = keeps("batch", "rows", "heads", impl=depending(lambda meta, spec: False))
    for layer in ("plain", "sliding_window", "chunked_local", "soft_cap", "sinks", "alibi", "lse", "fp8_kv"):
        for word in ("batch", "rows"):
            assert failures(backend, f"{word}-{layer}") == []


def test_a_class_level_scratch_that_keeps_old_values_is_found() -> None:
    calls = []

    def depends(meta: Any, spec: Any) -> bool:
        calls.append(None)
        return len(calls) % 2 == 0

    assert len(failures(keeps("batch", impl=depending(depends)), "batch-plain")) == 1


def test_a_backend_without_the_feature_has_no_such_checks() -> None:
    class Plain(TorchBackend):
        features: ClassVar[Feature] = TorchBackend.features & ~Feature.INVARIANCE

    assert checks(Plain) == {}


@pytest.mark.parametrize("part", [0, 1])
def test_half_of_the_heads_have_the_scales_of_these_heads(part: int) -> None:
    target = Target(TorchBackend, resolve_device("cpu"))
    spec = target.paged_spec(kv_cache_dtype="fp8_e4m3", head_scales=True)
    half = spec.replace(num_heads=spec.num_heads // 2, num_kv_heads=spec.num_kv_heads // 2)
    whole = invariance._batch(target, spec, [33], [33], None)
    own = invariance._half(invariance._batch(target, half, [33], [33], None), whole, part)
    found, expected = (invariance._run(target, batch).rows(0)[0] for batch in (own, whole))
    assert torch.equal(found, expected.chunk(2, 1)[part])
