"""The backend under check, the device it is checked on, and the steps of a phase.

Layers to check a backend with that refuses plain ones: each asks for one thing more, for two, or for three.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.device import Device
from attnplug.core.dtypes import bare_dtype_name, kv_cache_dtype_name
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.kv_format import kv_format, with_codecs
from attnplug.core.mla.dims import MLADims
from attnplug.core.reasons import Reason
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.batches import Batch, StepArguments, direct_batch, paged_batch
from attnplug.testing.conformance.check import CheckSkipped, Level, SkipKind
from attnplug.testing.conformance.harness import Harness, layer_words
from attnplug.testing.design.search import BLOCK_SIZES, HEAD_SIZES, compile_key, sizes_to_try, spread
from attnplug.testing.drawn_values import layer_tensors

if TYPE_CHECKING:
    from attnplug.testing.conformance.cases.designed_cases import Designs


GPU_TYPES = ("cuda", "rocm")
"""Device types that torch drives as CUDA."""
_MOST_TOGETHER = 3
_OTHER_KINDS: tuple[dict[str, Any], ...] = (
    {"attn_type": "encoder_only", "direct_kv": True},
    {"attn_type": "encoder", "direct_kv": True},
)


def base_layers(backend: type[AttentionBackend], stored: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The arguments of a LayerSpec for one declared feature, then for two, then for three.

    Args:
        backend: the class.
        stored: the storage types that it declares.
    """
    size = backend.get_preferred_block_size()
    flags = [flag for flag in Feature if flag in backend.features and flag is not Feature.MLA]
    asks = [flag.fields(64, size) for flag in flags]
    asks += [{"kv_cache_dtype": name} for name in stored]
    others: list[dict[str, Any]] = [{flag.ask.field: value} for flag in flags for value in flag.ask.values]
    yield [*asks, *others, *_OTHER_KINDS]
    for count in range(2, _MOST_TOGETHER + 1):
        yield [
            {field: value for each in several for field, value in each.items()}
            for several in itertools.combinations(asks, count)
            if len(set[str]().union(*several)) == sum(map(len, several))
        ]


# Pairs of kv_lora_rank and qk_rope_head_dim: a small one for backends of any, and those of models.
_PAIRS = ((64, 16), (512, 64), (256, 64), (512, 0), (256, 32))


def latent_dims(pair: tuple[int, int], nope: int = 32, value: int = 24) -> MLADims:
    """Dimensions of latents of a pair; keys and values of sizes that no other size equals."""
    rank, rope = pair
    return MLADims(
        q_lora_rank=None,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
    )


def layer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a LayerSpec: a layer with dimensions of latents has their size, and one KV head."""
    dims = fields.get("mla")
    return {**fields, **({"num_kv_heads": 1, "head_size": dims.latent_size} if dims else {})}


# Heads and KV heads of small layers: some kernels serve one number of query heads per KV head.
_HEADS = ((4, 2), (4, 4), (4, 1), (8, 1))
_PROBED_SIZES, _MOST_BASES = 8, 8
"""Head sizes to search for a layer of backends that refuse plain ones, and the layers to keep."""
_MOST_KEYS = 4
"""Compile keys of layers that differ in one thing."""
_LONGER = 3
"""New tokens of a decode that becomes a prefill."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One backend on one device of this machine; `level` decides how many layers and batches are tried.

    Layers are made with `options`, an instance of the backend's `Options`; None is its defaults.
    """

    backend: type[AttentionBackend]
    device: Device
    level: Level = Level.SMOKE
    options: Any = None
    designs: Designs | None = dataclasses.field(default=None, compare=False, repr=False)
    """Cases that another process has found; None searches for them."""

    @property
    def own_options(self) -> Any:
        """The options to make layers of `backend` with; None for its defaults."""
        # Options are of the class that was asked for. Another class may serve some layers under its name.
        declared = self.backend.Options
        return self.options if declared is not None and isinstance(self.options, declared) else None

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.get_name()

    @property
    def torch_device(self) -> str:
        """The torch device of the tensors: "cpu", "cuda" (also for ROCm), "xpu", ..."""
        return "cuda" if self.device.type == "rocm" else self.device.type

    @property
    def dtypes(self) -> list[str]:
        """The declared dtypes; float32 first, since its tolerances show errors best."""
        names = [bare_dtype_name(dtype, "supported_dtypes") for dtype in self.backend.supported_dtypes]
        return sorted(dict.fromkeys(names), key=lambda name: name != "float32")

    @property
    def kv_cache_dtypes(self) -> list[str]:
        """The declared storage types; "auto" first."""
        field = "supported_kv_cache_dtypes"
        names = [kv_cache_dtype_name(dtype, field) for dtype in self.backend.supported_kv_cache_dtypes]
        return sorted(with_codecs(names), key=lambda name: name != "auto")

    @property
    def scaled_kv_dtypes(self) -> list[str]:
        """The declared storage types with scales of the layer whose numbers the kit knows."""
        return [name for name in self.kv_cache_dtypes if kv_format(name).has_scaled_numbers]

    @property
    def scaled_families(self) -> dict[str, str]:
        """The first of `scaled_kv_dtypes` of each family, by the family."""
        return {kv_format(name).family or name: name for name in reversed(self.scaled_kv_dtypes)}

    def storing(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields, with the first declared storage type of the family of theirs."""
        stored = fields.get("kv_cache_dtype")
        own = stored and self.scaled_families.get(kv_format(stored).family or stored)
        return {**fields, **({"kv_cache_dtype": own} if own else {})}

    @property
    def head_sizes(self) -> list[int]:
        """Head sizes to try, the plainest first."""
        sizes = sizes_to_try(self.backend.get_supported_head_sizes() or (MultipleOf(1),), HEAD_SIZES)
        return sorted(sizes, key=lambda size: size != 64)

    @property
    def latents(self) -> list[MLADims]:
        """The dimensions of latents to try, the plainest first; none if the backend serves other layers."""
        # They have the pairs that the backend declares, else common ones and other head sizes. A prefill on
        # kernels of one head size pads the smaller of expanded keys and values, so some have larger values.
        if not self.is_latent:
            return []
        pairs = [(int(rank), int(rope)) for rank, rope in getattr(self.backend, "latent_sizes", ())] or [
            *_PAIRS
        ]
        sizes = spread(self.head_sizes, 6 if self.level is Level.SMOKE else 12)
        # Sizes that are no power of 2 come first.
        sizes = sorted(sizes, key=lambda size: size & (size - 1) == 0)
        others = [(size - _rope_of(size), _rope_of(size)) for size in sizes if size not in map(sum, pairs)]
        expanded = [latent_dims(pairs[0], 24, 56), *(latent_dims(pair, 128, 128) for pair in pairs)]
        return [*map(latent_dims, pairs), expanded[0], *map(latent_dims, others), *expanded[1:]]

    def sized(self, size: int) -> dict[str, Any]:
        """The value of an axis that gives a layer this head size: of latents, dimensions with this sum."""
        if not self.is_latent:
            return {"head_size": size}
        found = (dims for dims in self.latents if dims.latent_size == size)
        return {"mla": next(found, None) or latent_dims((size - _rope_of(size), _rope_of(size)))}

    @property
    def block_sizes(self) -> list[int]:
        """Block sizes to try, the preferred one first."""
        allowed = self.backend.get_supported_kernel_block_sizes()
        return list(
            dict.fromkeys([self.backend.get_preferred_block_size(), *sizes_to_try(allowed, BLOCK_SIZES)])
        )

    @property
    def phase(self) -> Phase | None:
        """The one phase that the backend serves; None if it serves both or declares no known phase."""
        served = [phase for phase in Phase if phase in map(str, self.backend.supported_phases)]
        return served[0] if len(served) == 1 else None

    @property
    def is_latent(self) -> bool:
        """Whether the backend serves latent attention, and so no other layers."""
        return Feature.MLA in self.backend.features

    def reasons(self, spec: LayerSpec) -> list[Reason]:
        """Why the backend refuses `spec`, in its one phase if it has one; empty if it serves it."""
        return self.backend.validate_configuration(spec, self.device, self.phase)

    def spec(self, **fields: Any) -> LayerSpec:
        """A small layer that the backend serves: 4 heads, 2 KV heads, a common head size and dtype, and `fields`.

        A backend that refuses these numbers of heads gets others. One that refuses every plain layer, such as a
        backend of windows alone, gets the plainest layers that it serves, with `fields` in the place of theirs.

        For a backend of latent attention it has 4 heads and small dimensions that the backend serves.

        Raises:
            CheckSkipped: the backend serves no such layer; the text has the reasons.
        """
        refusals: list[str] = []
        for base in itertools.chain(({},), _served_bases(self)):
            found = self._find_layer({**self._sparse_fields(), **base, **fields}, refusals)
            if found is not None:
                return found
        raise CheckSkipped(
            f"{self.name} serves no layer with {fields}: {'; '.join(dict.fromkeys(refusals))}", SkipKind.LAYER
        )

    def require(self, spec: LayerSpec) -> LayerSpec:
        """The layer; CheckSkipped if the backend refuses it."""
        if reasons := self.reasons(spec):
            raise CheckSkipped(
                f"{self.name} serves no {layer_words(spec)}: {'; '.join(reasons)}", SkipKind.LAYER
            )
        return spec

    def changed(self, spec: LayerSpec, **fields: Any) -> LayerSpec:
        """`spec` with other `fields`; CheckSkipped if there is no such layer, or the backend refuses it."""
        try:
            other = spec.replace(**fields)
        except SpecError as problem:
            raise CheckSkipped(f"no {layer_words(spec)} has {fields}: {problem}", SkipKind.LAYER) from None
        return self.require(other)

    def variants(
        self, base: LayerSpec, changes: Sequence[dict[str, Any]], keys: set[Hashable]
    ) -> Iterator[tuple[dict[str, Any], LayerSpec]]:
        """The `changes` with which the backend serves `base`, and those layers.

        Kernels of few compile keys are tried: those in `keys`, and new ones, which are added.
        """
        for fields in changes:
            try:
                spec = self.changed(base, **fields)
            except CheckSkipped:
                continue
            key = compile_key(self.backend, spec)
            is_new = key is not None and key not in keys
            if not (is_new and len(keys) >= _MOST_KEYS):
                keys.add(key)
                yield fields, spec

    def serves(self, **fields: Any) -> bool:
        """Whether the backend serves a small layer with `fields`."""
        try:
            self.spec(**fields)
        except CheckSkipped:
            return False
        return True

    def _find_layer(
        self, fields: Mapping[str, Any], refusals: list[str], most_sizes: int | None = None
    ) -> LayerSpec | None:
        """The first layer with `fields` that is served; the reasons against others are added to `refusals`."""
        sizes: list[dict[str, Any]] = [
            {"head_size": size, "num_heads": heads, "num_kv_heads": kv_heads}
            for size in self.head_sizes[:most_sizes]
            for heads, kv_heads in _HEADS
        ]
        if self.is_latent:
            sizes = [layer_fields({"mla": dims}) for dims in self.latents[:most_sizes]]
        for dtype, size in itertools.product(self.dtypes, sizes):
            base: dict[str, Any] = {"num_heads": 4, "dtype": dtype, **size}
            try:
                spec = LayerSpec(**{**base, **fields})
            except SpecError as problem:
                refusals.append(str(problem))
                continue
            reasons = self.reasons(spec)
            if not reasons:
                return spec
            refusals += reasons
        return None

    def _sparse_fields(self) -> dict[str, Any]:
        """The fields of a sparse layer if the backend serves only those."""
        flag, backend = Feature.SPARSE, self.backend
        if flag not in backend.features or backend.serves_dense:
            return {}
        served = [value for value in flag.ask.values if value.kind in backend.supported_sparse_kinds]
        return {flag.ask.field: served[0]} if served else {}

    def block_size(self, spec: LayerSpec) -> int:
        """Tokens per page: of `spec`, or the backend's preferred number."""
        return spec.block_size or self.backend.get_preferred_block_size(spec, self.device)

    def batch(
        self,
        spec: LayerSpec,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        exact: bool = False,
        **options: Any,
    ) -> Batch:
        """A batch for `spec` on this device, over the backend's pages or with K and V in the call.

        For a backend of one phase, `of_phase` makes the step one of that phase, unless the check needs these
        `exact` lengths. Otherwise requests that builders take for decodes come first, as engines order them. The
        `options` are those of `paged_batch` and `direct_batch`.

        Raises:
            CheckSkipped: the step cannot be one of the phase that the backend serves, or of that order.
        """
        if spec.is_encoder and not exact:
            # An encoder computes all its tokens at once.
            query_lens = seq_lens
        if self.phase is not None:
            key_lens = [options["key_lens"]] if options.get("key_lens") is not None else []
            new, tokens, *key_lens = of_phase(self.phase, query_lens, seq_lens, *key_lens)
            changed = new != list(query_lens) or tokens != list(seq_lens)
            # An encoder computes all its tokens at once.
            partial = spec.is_encoder and new != tokens
            if not in_phase(self.phase, new) or (exact and changed) or partial:
                queries = ", ".join(map(str, query_lens))
                raise CheckSkipped(
                    f"{self.name} serves {self.phase} only: no step with queries of {queries} tokens",
                    SkipKind.PHASE,
                )
            query_lens, seq_lens = new, tokens
            if key_lens:
                options["key_lens"] = key_lens[0]
        # Steps that begin with the short queries have the order for any threshold.
        elif list(query_lens) != sorted(query_lens) and (threshold := _threshold(self, spec)) is not None:
            order = sorted(range(len(query_lens)), key=lambda request: query_lens[request] > threshold)
            if exact and order != sorted(order):
                why = f"reorder_batch_threshold={threshold} puts shorter queries first"
                raise CheckSkipped(f"{self.name}: {why} than in {list(query_lens)}", SkipKind.PHASE)
            query_lens, seq_lens = ([each[request] for request in order] for each in (query_lens, seq_lens))
            for name in ("key_lens", "spans"):
                if options.get(name) is not None:
                    options[name] = [options[name][request] for request in order]
        if spec.direct_kv:
            if list(query_lens) != list(seq_lens):
                options.setdefault("key_lens", list(seq_lens))
            for name in ("block_size", "layout", "drop_window"):
                options.pop(name, None)
            drawn = direct_batch(spec, query_lens, seq_lens, device=self.torch_device, **options)
        else:
            options.setdefault("block_size", self.block_size(spec))
            options.setdefault("layout", self.backend.supported_kv_cache_layouts()[0])
            drawn = paged_batch(
                spec, query_lens, seq_lens, device=self.torch_device, backend=self.backend, **options
            )
        drawn.made_of = StepArguments(self, spec, tuple(query_lens), tuple(seq_lens), options)
        return _with_tensors_of_layer(drawn)

    def paged_spec(self, **fields: Any) -> LayerSpec:
        """As `spec`, for a layer whose K and V are in pages: a decoder, or a cross layer of a backend of those alone.

        Raises:
            CheckSkipped: the backend serves no such layer.
        """
        try:
            return self.spec(**{"attn_type": "decoder", **fields, "direct_kv": False})
        except CheckSkipped:
            cross: dict[str, Any] = {"attn_type": "encoder_decoder", **fields}
            if "attn_type" in fields or self._find_layer({**self._sparse_fields(), **cross}, []) is None:
                raise
        return self.spec(**cross)


def _with_tensors_of_layer(batch: Batch) -> Batch:
    """The batch with the sinks and slopes that its layer has in batches of every seed."""
    if not (batch.spec.has_sinks or batch.spec.has_alibi):
        return batch
    own = layer_tensors(batch.spec, numbers=batch.numbers, device=str(batch.query.device))
    tensors = dataclasses.replace(batch.tensors, sinks=own.sinks, alibi_slopes=own.alibi_slopes)
    return dataclasses.replace(batch, tensors=tensors)


@functools.lru_cache(maxsize=1024)
def _threshold(target: Target, spec: LayerSpec) -> int | None:
    """The `reorder_batch_threshold` of the builder of a layer; None also if none can be made, which other checks report."""
    harness, _ = guarded_call(lambda: Harness.of(target, target.batch(spec, [2], [2])))
    threshold = None if harness is None else harness.builder.reorder_batch_threshold
    return threshold if type(threshold) is int else None


@functools.lru_cache(maxsize=64)
def _served_bases(target: Target) -> tuple[dict[str, Any], ...]:
    """The fields, other than sizes, of layers for a backend that refuses plain ones; empty if it serves them.

    Layers that ask for one thing are tried before those that ask for two or three; the first served ones count.
    """
    selecting = target._sparse_fields()
    if target._find_layer(selecting, []) is not None:
        return ()
    for asked in base_layers(target.backend, target.kv_cache_dtypes):
        if found := [base for base in asked if target._find_layer({**selecting, **base}, [], _PROBED_SIZES)]:
            return tuple(found[:_MOST_BASES])
    return ()


def _rope_of(size: int) -> int:
    """The elements with positions of latents of no usual pair."""
    return min(size // 4, 64)


def in_phase(phase: Phase | None, query_lens: Sequence[int]) -> bool:
    """Whether a step is of the phase: only single tokens for decode, a longer query first for prefill."""
    if phase is Phase.DECODE:
        return max(query_lens, default=0) <= 1
    return phase is None or (len(query_lens) > 0 and query_lens[0] > 1)


def of_phase(phase: Phase | None, query_lens: Sequence[int], *others: Sequence[int]) -> tuple[list[int], ...]:
    """The nearest step of the phase.

    Args:
        phase: None leaves the step as it is.
        query_lens: new tokens of each request.
        others: more values of each request, first the number of all its tokens.

    Returns:
        The new tokens, then the others, in the same order of requests. For decode, each request has at
        most its last token. For prefill, longer queries come first; if there is none, queries get longer.
    """
    new = list(query_lens)
    if phase is Phase.DECODE:
        new = [min(count, 1) for count in new]
    elif phase is Phase.PREFILL and max(new, default=0) <= 1:
        new = [min(_LONGER * count, tokens) for count, tokens in zip(new, others[0], strict=True)]
    order = list(range(len(new)))
    if phase is Phase.PREFILL:
        order.sort(key=lambda request: new[request] <= 1)
    return tuple([values[request] for request in order] for values in (new, *others))
