"""KV groups whose builders have equal `build_key` share a build, so the key needs all that a build reads of a layer."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

from attnplug._system.text import shown
from attnplug.core.errors import AttnplugError
from attnplug.core.interface.signatures import overrides
from attnplug.core.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    own_build_key,
)
from attnplug.core.spec import LayerSpec
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import (
    decode_lengths,
    layer_without_limits,
    mixed_lengths,
    paged_scenarios,
    with_pages,
)
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, error_context
from attnplug.testing.conformance.declared.options import values_of, with_values
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.mistakes.deviation import deviation
from attnplug.testing.conformance.mistakes.expectations import difference, expect_own_slots, wrong_answer
from attnplug.testing.conformance.target import Target, layer_fields
from attnplug.testing.drawn_values import layer_tensors

_MOST_SIZES = 3
_HEADS = ((4, 2), (8, 2), (4, 4), (8, 1))
_SCALES: tuple[dict[str, Any], ...] = ({"k_scale": 0.37, "v_scale": 1.9}, {"k_scale": 1.9, "v_scale": 0.37})
_Fields: TypeAlias = dict[str, Any]
_Lengths: TypeAlias = tuple[Sequence[int], Sequence[int]]
_Build: TypeAlias = Callable[[AttentionMetadataBuilder[Any], CommonAttentionMetadata], AttentionMetadata]
_BUILDS: dict[str, _Build] = {
    "build": lambda builder, common: builder.build(0, common),
    "build_for_drafting": lambda builder, common: builder.build_for_drafting(common, 1),
}


def checks(target: Target) -> Iterator[Check]:
    """One check, of backends that serve layers over pages."""
    if paged_scenarios(target):
        summary = "groups of layers whose builders have equal build_key are served by one build"
        yield Check.of("builder/build_key", summary, _check_keys, target)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """A KV group of one layer, "a layer with window=(6, 0)" in `words`, with its step, its builder and its options."""

    words: str
    batch: Batch
    harness: Harness
    options: Any


def _check_keys(target: Target) -> None:
    latent = with_pages(target, target.paged_spec()) if target.is_latent else None
    spec, size = latent or layer_without_limits(target)
    shared = False
    for lengths in (mixed_lengths(size), decode_lengths(size)):
        for groups in _alike(target, spec, lengths):
            for pair in itertools.permutations(groups, 2):
                if _share(*pair):
                    shared = True
                    drafts = overrides(type(pair[0].harness.builder), "build_for_drafting")
                    for name in _BUILDS if drafts and set(lengths[0]) == {1} else ("build",):
                        _expect_served(*pair, name)
    if not shared:
        raise CheckSkipped(f"no two groups of layers that {target.name} serves share a build")


def _variants(target: Target, spec: LayerSpec, size: int) -> list[list[_Fields]]:
    """Fields that make layers differ in one thing from `spec` and from each other, by that thing."""
    return [
        [{"window": (6, 0)}, {"window": (size + 1, 0)}],
        [{"chunk_size": size}, {"chunk_size": 2 * size}],
        [{"mm_prefix": True}, {"mm_prefix": True, "window": (6, 0)}],
        [{"logits_soft_cap": 1.7}, {"logits_soft_cap": 3.0}],
        [{"has_sinks": True}] * 2,
        [{"has_alibi": True}] * 2,
        [{"scale": spec.scale / 2}],
        [{"needs_lse": True}],
        [{"dtype": name} for name in target.dtypes],
        [{"kv_cache_dtype": name} for name in target.scaled_kv_dtypes[:2]],
        [{"block_size": each} for each in target.block_sizes[:_MOST_SIZES]],
        *_sizes(target),
    ]


def _sizes(target: Target) -> list[list[_Fields]]:
    if target.is_latent:
        return [
            [{"num_heads": 8}, {"num_heads": 16}],
            [layer_fields({"mla": dims}) for dims in target.latents[:_MOST_SIZES]],
        ]
    sizes = target.head_sizes[:_MOST_SIZES]
    return [
        [{"num_heads": heads, "num_kv_heads": kv_heads} for heads, kv_heads in _HEADS],
        [{"head_size": each, "head_size_v": each} for each in sizes],
        [{"head_size_v": each} for each in sizes],
    ]


def _alike(target: Target, spec: LayerSpec, lengths: _Lengths) -> Iterator[list[_Group]]:
    """KV groups that differ in one thing, the plainest one first."""
    keys: set[Hashable] = set()
    plain = _groups(target, spec, lengths, [{}], keys)
    for variants in _variants(target, spec, spec.block_size or 16):
        yield [*plain, *_groups(target, spec, lengths, variants, keys)]
    for name, tried in values_of(target.backend.Options, target.own_options).items():
        yield [*plain, *_groups_with_options(target, spec, lengths, name, tried)]


def _groups(
    target: Target, spec: LayerSpec, lengths: _Lengths, variants: Sequence[_Fields], keys: set[Hashable]
) -> list[_Group]:
    """The groups of those variants of `spec` that are served; `keys` collects their compile keys."""
    found = []
    for seed, (fields, other) in enumerate(target.variants(spec, variants, keys), 1):
        with contextlib.suppress(CheckSkipped):  # the options of the run are refused for this layer
            found.append(_group(target, other, lengths, _words(fields), seed if fields else 0))
    return found


def _groups_with_options(
    target: Target, spec: LayerSpec, lengths: _Lengths, name: str, tried: Sequence[Any]
) -> list[_Group]:
    found = []
    for seed, value in enumerate(tried, 1):
        # Options may exclude each other, and from_spec or the first call may refuse some for this layer or device.
        with contextlib.suppress(AttnplugError, ValueError, ConformanceError):
            options, words = (
                with_values(target, {name: value}),
                f"a layer with the option {name}={shown(value)}",
            )
            group = _group(target, spec, lengths, words, seed, options)
            group.harness.forward(group.batch)
            found.append(group)
    return found


def _group(
    target: Target, spec: LayerSpec, lengths: _Lengths, words: str, seed: int, options: Any = None
) -> _Group:
    scales = _SCALES[seed % 2] if spec.has_kv_scales else {}
    batch = target.batch(spec, *lengths, padding=3, drop_window=True, seed=seed, **scales)
    own = layer_tensors(spec, seed=seed, device=target.torch_device)
    tensors = dataclasses.replace(batch.tensors, sinks=own.sinks, alibi_slopes=own.alibi_slopes)
    batch = dataclasses.replace(batch, tensors=tensors)
    return _Group(words, batch, Harness.of(target, batch, options=options), options)


def _words(fields: _Fields) -> str:
    named = ", ".join(f"{name}={shown(value)}" for name, value in fields.items())
    return f"a layer with {named}" if named else "a plain layer"


def _share(first: _Group, second: _Group) -> bool:
    """Whether the runtime makes the metadata of the second group from those of the first."""
    one, other = first.harness.builder, second.harness.builder
    if type(one) is not type(other) or not other.supports_update_block_table:
        return False
    return _key(first) == _key(second)


def _key(group: _Group) -> Hashable:
    builder = group.harness.builder
    with error_context(f"build_key of the builder of {group.words}, which must be hashable"):
        key = own_build_key(builder)
        hash(key)
    # All layers of a plan have a backend's options alike, so without a key nothing else tells groups apart.
    alike = builder.kv_cache_spec, group.batch.spec, repr(group.options)
    return alike if key is None else (key,)


def _expect_served(first: _Group, second: _Group, name: str) -> None:
    """Run the layer of the second group with a copy of the metadata that the first group built."""
    one, other = first.batch.common, second.batch.common
    # The groups are of one step, so they have one selection: of keys that the queries of both see.
    selection = (other if first.batch.spec.mm_prefix else one).selection
    both = dataclasses.replace(
        one,
        selection=selection,
        mm_prefix_spans=one.mm_prefix_spans if other.mm_prefix_spans is None else other.mm_prefix_spans,
        mm_prefix_spans_cpu=(
            one.mm_prefix_spans_cpu if other.mm_prefix_spans_cpu is None else other.mm_prefix_spans_cpu
        ),
    )
    other = dataclasses.replace(other, selection=selection)
    batch = dataclasses.replace(second.batch, common=other)
    what = f"{second.words}, with the metadata that update_block_table made from the {name} of {first.words}"
    with error_context(what):
        made = _BUILDS[name](first.harness.builder, both)
        copied = second.harness.builder.update_block_table(made, other.block_table_tensor, other.slot_mapping)
        expect_own_slots(copied, other, what)
        found = second.harness.run(batch, copied)
    wrong = deviation(batch, found)
    if wrong is None:
        return
    alone = second.harness.run(batch, _BUILDS[name](second.harness.builder, other))
    mistake = None
    if difference(batch, alone) is None:
        mistake = "the build of another group"
        key = shown(second.harness.builder.build_key)
        what += (
            f": both builders have build_key={key}, so a build is shared though it depends on more of the layer; "
            "add that to the key"
        )
    raise wrong_answer(f"{what}: {wrong.problem}", mistake, wrong)
