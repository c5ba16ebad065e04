"""The declaration of a backend that decodes multi-head latent attention. It imports no torch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.checks import check_size
from attnplug.core.composite.pair import decode_of, make_pair, said_by
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.interface.answers import answer, serving_class
from attnplug.core.reasons import Reason
from attnplug.core.spec import LayerSpec, Phase

if TYPE_CHECKING:
    from attnplug.core.device import Device

_SERVED = Feature.MLA | Feature.LSE | Feature.FP8_KV | Feature.SPARSE
"""The features that the base of latent attention carries out, in the decode and in the expanded prefill."""


class QueryLens(enum.StrEnum):
    """The query lengths of the decodes that one call of `decode` takes."""

    SINGLE = "single"
    """One query of each request."""
    UNIFORM = "uniform"
    """The same number of queries of each request, at least one."""
    ANY = "any"
    """Any number of queries of each request, also none."""


class MLADecodeBackend(AttentionBackend):
    """Declares a backend whose impl writes only `decode`; `attnplug.mla` has the bases of impl and builder.

    The base writes the latents, multiplies by W_UK and W_UV, and prefills with expanded K and V on another backend.
    A class that serves `MLADecodeBackend` alone decodes. `with_prefill` gives the backend for both phases.

    With Feature.SPARSE it serves sparse layers too, in both phases and without a prefill half: each query is then a
    request of one query whose keys are in pages of one token. Their number is known on the device only.
    """

    supported_phases: ClassVar[Sequence[Phase | str]] = (Phase.DECODE,)
    features: ClassVar[Feature] = Feature.MLA | Feature.LSE
    serves_dense: ClassVar[bool] = True
    is_selecting: ClassVar[bool] = False
    """Whether it is the class that `for_layer` gives for sparse layers."""
    prefill: ClassVar[type[AttentionBackend] | None] = None
    """The backend that attends expanded K and V: any that serves `LayerSpec.expanded()`. None: decodes only."""

    latent_sizes: ClassVar[Sequence[tuple[int, int]]] = ()
    """The pairs (kv_lora_rank, qk_rope_head_dim) that it serves; empty for any."""
    query_layout: ClassVar[Literal["split", "packed"]] = "split"
    """The queries of `decode`: "split" in two contiguous tensors, "packed" in adjacent views of one buffer."""
    query_lens: ClassVar[QueryLens | str] = QueryLens.SINGLE
    """The query lengths of one call of `decode`."""
    decode_threshold: ClassVar[int] = 1
    """The longest query that is decoded on the latents; longer ones are prefilled, also those of drafts.

    A builder with `decodes_drafts` decodes any number of drafts of an engine.
    """

    @classmethod
    def for_layer(cls, spec: LayerSpec) -> type[AttentionBackend]:
        """For a sparse layer, if Feature.SPARSE is declared, the class that serves it in both phases; else this one."""
        if spec.mla is None or spec.sparse is None or cls.is_selecting or Feature.SPARSE not in cls.features:
            return cls
        return _selecting(decode_of(cls))

    @classmethod
    def padded_heads(cls, num_heads: int) -> int:
        """The number of heads that `decode` gets for a layer of `num_heads`: at least as many.

        The added heads have queries of zeros, and their outputs are dropped. The result is exact.
        """
        return num_heads

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        """The sums of `latent_sizes`."""
        return tuple(dict.fromkeys(rank + rope for rank, rope in cls.latent_sizes))

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse a pair that is not one of `latent_sizes`."""
        if spec.mla is None or not cls.latent_sizes:
            return None
        pair = (spec.mla.kv_lora_rank, spec.mla.qk_rope_head_dim)
        if pair in map(tuple, cls.latent_sizes):
            return None
        pairs = ", ".join(f"{rank}+{rope}" for rank, rope in cls.latent_sizes)
        return f"kv_lora_rank + qk_rope_head_dim of {pair[0]}+{pair[1]} is not one of {pairs}"

    @classmethod
    def validate_configuration(
        cls, spec: LayerSpec, device: Device, phase: Phase | None = None
    ) -> list[Reason]:
        """The reasons against the decode, then those of the prefill half against the expanded layer.

        Raises:
            SpecError: an attribute of the class has a value without meaning, or `padded_heads` gives too few.
        """
        serving = serving_class(cls, spec)
        if serving is not cls:
            return serving.validate_configuration(spec, device, phase)
        if spec.mla is not None:
            cls._check_declared(spec.num_heads)
        reasons = super().validate_configuration(spec, device, phase)
        told = {reason.code for reason in reasons}
        # A declared feature that the base does not carry out would be ignored.
        for flag in spec.required_features() & cls.features & ~_SERVED:
            if flag.code not in told:
                what = f"{flag.refusal} with MLA"
                reasons.append(Reason(what, code=flag.code, field=flag.ask.field))
        if spec.mla is None or cls.prefill is None or phase is Phase.DECODE or reasons:
            return reasons
        who = f"expanded prefill on {cls.prefill.get_name()}"
        asked = spec.expanded(), device, Phase.PREFILL
        return [said_by({who: each}) for each in answer(cls.prefill, "validate_configuration", *asked)]

    @classmethod
    def _check_declared(cls, num_heads: int) -> None:
        # A value that nobody checks here would be ignored, or raise in the first step.
        for field, known in (("query_layout", ("split", "packed")), ("query_lens", tuple(QueryLens))):
            if getattr(cls, field) not in known:
                raise SpecError(field, getattr(cls, field), f"must be one of {', '.join(known)}")
        check_size("decode_threshold", cls.decode_threshold)
        for pair in cls.latent_sizes:
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise SpecError("latent_sizes", pair, "must be pairs of kv_lora_rank and qk_rope_head_dim")
            check_size("latent_sizes", pair[0])
            check_size("latent_sizes", pair[1], 0)
        check_size("padded_heads", cls.padded_heads(num_heads), num_heads)

    @classmethod
    def notes(cls, spec: LayerSpec) -> tuple[str, ...]:
        """Facts about serving the layer that `attnplug explain` shows: padded heads."""
        padded = cls.padded_heads(spec.num_heads)
        return (f"{spec.num_heads} heads padded to {padded}",) if padded != spec.num_heads else ()

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable | None:
        """The key of the prefill half; a decode that compiles adds its own."""
        if cls.prefill is None or spec.mla is None or spec.sparse or spec.required_features() & ~_SERVED:
            return None
        key: Hashable = answer(cls.prefill, "compile_key", spec.expanded())
        return key

    @classmethod
    def watch_compiling(cls) -> AbstractContextManager[list[str]]:
        """The kernels of the prefill half; a decode that compiles adds its own."""
        return nullcontext([]) if cls.prefill is None else answer(cls.prefill, "watch_compiling")

    @classmethod
    def with_prefill(cls, prefill: type[AttentionBackend]) -> type[MLADecodeBackend]:
        """This backend with `prefill` for the expanded prefill, always the same class, for both phases."""
        if cls.is_selecting:
            raise SpecError("prefill", prefill.get_name(), "is not used: sparse layers decode every query")
        return cls if prefill is cls.prefill else _with_prefill(prefill, decode_of(cls))


# Cached, because selections and plans compare classes by identity.
@functools.cache
def _with_prefill(prefill: type[AttentionBackend], decode: type[MLADecodeBackend]) -> type[MLADecodeBackend]:
    name = "+".join(dict.fromkeys(answer(each, "get_name") for each in (prefill, decode)))
    doc = "Decodes latents on {decode} and prefills expanded K and V on {prefill}."
    phases = tuple(Phase)
    made: type[MLADecodeBackend]
    made = make_pair(_with_prefill, prefill, decode, decode, name, doc, supported_phases=phases)
    return made


# Cached, because `for_layer` must give the same class each time.
@functools.cache
def _selecting(decode: type[MLADecodeBackend]) -> type[MLADecodeBackend]:
    namespace: dict[str, Any] = {
        "__doc__": f"Decodes each query over its chosen latents on {decode.get_name()}.",
        "__module__": decode.__module__,
        "is_selecting": True,
        "prefill": None,
        "serves_dense": False,
        "supported_phases": tuple(Phase),
    }
    return type(f"Selecting{decode.__name__}", (decode,), namespace)
