"""The data with which the page answers for a config.json that a reader pastes: rules, and answers for a grid of layers.

The page maps the fields of a configuration to a key by the rules of `attnplug.integrations.known`, and looks the answer up.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnplug.core.device import Device
from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import AttentionType
from attnplug.integrations.known.decoders import Decoder
from attnplug.integrations.known.fields import ROPE_KINDS, Attention, Family, rope_checks
from attnplug.integrations.known.reading import ALIKE, FAMILIES
from attnplug.integrations.model_spec import Client
from attnplug.matrix.which_backend import BackendAnswer, answers_for

if TYPE_CHECKING:
    from attnplug.matrix.model_page import ExampleModel
    from attnplug.registry.registry import Registry

Texts = Callable[[Any, BackendAnswer, str, Mapping[str, str]], int]
"""Gives the number of an answer's text, with some words replaced."""

COUNTS = (3, 5, 7)
"""Layers of each kind in a model of the grid; a text has a place for each in their stead."""
KV_HEADS = 8
"""KV heads of its layers; a layer with latents has one."""
WINDOWS = ((2, 128), (129, 1 << 22))
"""Ranges of sliding windows. A priority differs between them; the answer is the same within one."""
GROUPS, SCALES, CAPS = (1, 128), (2.0**-9, 0.9), (1e-3, 1024.0)
"""Query heads for each KV head, softmax scales and soft caps that have the same answers. Above, TRITON has another priority."""

# Query heads are exact here: a backend pads those that are no power of two, and a note of the answer says so.
_LATENTS = tuple((heads, 512, 64, 128, 128) for heads in (16, 32, 64, 128))
_GLM = (20, 512, 64, 192, 256)
_BOTH = ("bfloat16", "float16")
_GRID: tuple[tuple[tuple[str, ...], Sequence[Any], str, Sequence[str]], ...] = (
    (("full",), (32, 64, 80, 96, 100, 112, 128, 256), "", _BOTH),
    (("sliding",), (64, 96, 128), "", _BOTH),
    (("sliding", "full"), (128, 256), "", _BOTH),
    (("full", "sliding"), (128,), "", ("bfloat16",)),
    (("sliding", "full"), (128, 256), "cap", ("bfloat16",)),
    (("sliding", "full"), (64,), "sinks", ("bfloat16",)),
    (("chunked", "full"), (128,), "", ("bfloat16",)),
    (("full",), (64, 80, 96, 128), "ALiBi", _BOTH),
    (("encoder_only",), (32, 64), "", (*_BOTH, "float32")),
    (("encoder", "full", "cross"), (64,), "", (*_BOTH, "float32")),
    (("mla",), (*_LATENTS, _GLM), "", ("bfloat16",)),
    (("mla",), _LATENTS[2:], "topk2048", ("bfloat16",)),
)
"""Kinds of layers in the order of a model, sizes of heads or latents, what else they ask for, and dtypes."""
_CHUNK = 8192
_TYPES = {"encoder": AttentionType.ENCODER, "encoder_only": AttentionType.ENCODER_ONLY}
_TYPES |= {"cross": AttentionType.ENCODER_DECODER}


def pasted_data(
    registry: Registry, devices: Sequence[Device], texts: Texts, make: Callable[..., ExampleModel]
) -> dict[str, Any]:
    """The data as plain JSON values.

    `keys` has a place in `rows` for each key of layers, and a row an index into the page's texts for each device
    and KV dtype. Each key was asked at both ends of its ranges; one whose answers differ is left out.
    """
    rows: dict[tuple[tuple[int, ...], ...], int] = {}
    keys = {}
    for key, kinds, ends in _questions():
        found = []
        for attention, dtype, window, cap in ends:
            model = make("your model", "", _layers(kinds, attention, dtype))
            marks = {
                model.path: "config.json",
                f"sliding {window}": "sliding {window}",
                f"soft cap {cap:g}": "soft cap {cap}",
            }
            names = {"encoder_only": "encoder"}
            for place, (count, kind) in enumerate(zip(COUNTS, kinds, strict=False)):
                name = names.get(kind, kind)
                marks |= {
                    f"{count} {name} ": f"{{{place}}} {name} ",
                    f"{count} {name},": f"{{{place}}} {name},",
                }
            found.append(
                tuple(
                    tuple(
                        texts(model, answer, choice, marks)
                        for choice, answer in answers_for(registry, model, device).items()
                    )
                    for device in devices
                )
            )
        if found[0] == found[1]:
            keys[key] = rows.setdefault(found[0], len(rows))
    return {
        "keys": keys,
        "rows": list(rows),
        "counts": COUNTS,
        "kvHeads": KV_HEADS,
        "windows": WINDOWS,
        "groups": GROUPS,
        "scales": SCALES,
        "caps": CAPS,
        "chunk": _CHUNK,
        # As text: JSON in a page does not tell 1 from 1.0, and the rules do.
        "rules": json.dumps(rules_data(), separators=(",", ":")),
    }


def _questions() -> Iterator[tuple[str, tuple[str, ...], list[tuple[list[Attention], str, int, float]]]]:
    """Each key with its kinds, and the layers at both ends of its ranges."""
    for kinds, sizes, flag, dtypes in _GRID:
        windows = WINDOWS if "sliding" in kinds else WINDOWS[:1]
        for size, dtype, (place, window) in itertools.product(sizes, dtypes, enumerate(windows)):
            words = [f"sliding{place}" if kind == "sliding" else kind for kind in kinds]
            shown = "/".join(map(str, size)) if isinstance(size, tuple) else str(size)
            ends = [
                (
                    [_attention(kind, size, flag, end, window[end]) for kind in kinds],
                    dtype,
                    window[end],
                    CAPS[end],
                )
                for end in (0, 1)
            ]
            yield " ".join(filter(None, [dtype, shown, "+".join(words), flag])), kinds, ends


def _attention(kind: str, size: Any, flag: str, end: int, window: int) -> Attention:
    """A layer of the grid at one end of every range."""
    if kind == "mla":
        heads, rank, rope, nope, value = size
        sparse = SparseSpec("token_topk", int(flag.removeprefix("topk"))) if flag else None
        return Attention(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=nope + rope,
            head_size_v=value,
            scale=SCALES[end],
            mla=MLADims(
                q_lora_rank=(None, 1536)[end],
                kv_lora_rank=rank,
                qk_nope_head_dim=nope,
                qk_rope_head_dim=rope,
                v_head_dim=value,
            ),
            sparse=sparse,
        )
    grouped = kind in ("full", "sliding", "chunked") and flag != "ALiBi"
    causal = kind not in _TYPES
    return Attention(
        num_heads=KV_HEADS * (GROUPS[end] if grouped else 1),
        num_kv_heads=KV_HEADS,
        head_size=size,
        scale=SCALES[end],
        attn_type=_TYPES.get(kind, AttentionType.DECODER),
        window=(window - 1 if kind == "sliding" else -1, 0 if causal else -1),
        chunk_size=_CHUNK if kind == "chunked" else None,
        logits_soft_cap=CAPS[end] if flag == "cap" else None,
        has_sinks=flag == "sinks",
        has_alibi=flag == "ALiBi",
        is_paged=kind not in ("encoder", "encoder_only"),
    )


def _layers(kinds: tuple[str, ...], attention: list[Attention], dtype: str) -> dict[str, Any]:
    specs = [
        each.spec(kind, 1, dtype, "auto", Client.ENGINE) for kind, each in zip(kinds, attention, strict=True)
    ]
    return {
        f"{kind}.{index}": spec
        for kind, spec, count in zip(kinds, specs, COUNTS, strict=False)
        for index in range(count)
    }


def rules_data() -> dict[str, Any]:
    """The rules of every model type as plain JSON values, for the script that reads a configuration."""
    checks: dict[str, int] = {}

    def family_data(family: Family) -> dict[str, Any]:
        read: Any = family.read
        rule = None
        if isinstance(read, Decoder):
            rule = dataclasses.asdict(read) | {
                "kinds": _named(read.kinds),
                "scale": _named(read.scale)[0],
                "also": read.also and _named(read.also)[0],
            }
        return {
            "classes": list(family.classes),
            "fields": {
                name: checks.setdefault(json.dumps(check.data), len(checks))
                for name, check in family.fields.items()
            },
            "required": family.required,
            "defaults": dict(family.defaults),
            "read": "decoder" if rule else _named(read)[0],
            "rule": rule,
        }

    families = {
        name: family_data(family) for name, family in FAMILIES.items() if Client.ENGINE in family.clients
    }
    return {
        "alike": ALIKE,
        "families": families,
        "checks": [json.loads(check) for check in checks],
        "ropes": {
            kind: {"required": required, "checks": {name: check.data for name, check in its.items()}}
            for kind, (required, its) in ((kind, rope_checks(kind)) for kind in ROPE_KINDS)
        },
    }


def _named(function: Any) -> list[Any]:
    """The name of a function of a rule, without its underscore, and the arguments that are bound to it."""
    if isinstance(function, functools.partial):
        return [*_named(function.func), *function.args]
    return [function.__name__.lstrip("_")]
