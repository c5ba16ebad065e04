"""Workloads: the shapes of steps to measure, by name or by list, with their weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attnplug.core.errors import PolicyError
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.measured.step_shapes import MOST_TOKENS, StepShape, tokens_of

Workload: TypeAlias = tuple[tuple[StepShape, float], ...]
"""Shapes with their weights."""

_NAMED = {
    "chat": (
        ("decode 64 x 4k ragged", 4.0),
        ("decode 8 x 4k", 2.0),
        ("decode 1 x 4k", 1.0),
        ("decode 16 x 4 of 4k", 1.0),
        ("prefill 4 x 1k", 1.0),
        ("prefill 64 x 100", 1.0),
        ("prefill 4 x 512 of 4k ragged", 1.0),
        ("mixed 48 x 4k + 1 x 512 of 2k ragged", 1.0),
    ),
    "long": (
        ("decode 8 x 64k ragged", 4.0),
        ("decode 1 x 64k", 2.0),
        ("decode 1 x 4 of 64k", 1.0),
        ("prefill 1 x 16k", 1.0),
        ("prefill 1 x 2k of 32k", 2.0),
        ("prefill 4 x 64 of 16k", 1.0),
        ("mixed 8 x 32k + 1 x 512 of 8k", 1.0),
    ),
    "batch": (
        ("decode 256 x 1k ragged", 4.0),
        ("decode 64 x 8k", 2.0),
        ("prefill 16 x 1k", 2.0),
        ("prefill 4 x 4k", 1.0),
        ("prefill 200 x 40", 1.0),
        ("prefill 30 x 300", 1.0),
        ("mixed 24 x 3k + 1 x 512 of 512", 1.0),
    ),
}
NAMES: tuple[str, ...] = tuple(_NAMED)
"""The names of workloads."""
DEFAULT = "chat"

_PAIR = re.compile(r"\d{1,8}\s*x\s*\d{1,8}k?(?:\s+of\s+\d{1,8}k?)?")


def workload_of(text: str) -> Workload:
    """The workload of a name, or of shapes with commas between them, which weigh alike.

    Raises:
        PolicyError: an unknown name, text that is no shape, or a shape twice.
    """
    if text.strip().lower() in _NAMED:
        return tuple((StepShape.parse(each), weight) for each, weight in _NAMED[text.strip().lower()])
    if not re.search(r"\d", text):
        limit = f"is no workload; there are {', '.join(NAMES)}, and lists of shapes"
        raise PolicyError("--workload", text, limit, "write 'decode 64 x 8k, prefill 4 x 4k'")
    return _alike([StepShape.parse(each, "--workload") for each in text.split(",")], "--workload", text)


def workload_from_lists(batch: str | None, context: str | None, prefill: str | None) -> Workload:
    """Decodes of each batch with each context, and prefills such as "4x4k" or "4x1k of 9k"; all weigh alike.

    Without `batch` it is "1,8,64" and without `context` "8k", if the other one is given.

    Raises:
        PolicyError: text of another form, or a shape twice.
    """
    shapes = []
    if batch is not None or context is not None:
        batches = _numbers("--batch", "1,8,64" if batch is None else batch)
        contexts = _numbers("--context", "8k" if context is None else context)
        shapes += [StepShape(Phase.DECODE, many, 1, tokens) for tokens in contexts for many in batches]
    for part in prefill.split(",") if prefill is not None else ():
        if _PAIR.fullmatch(part.strip().lower()) is None:
            raise PolicyError("--prefill", part, "is no prefill", "write 4x4k, or 4x1k of 9k")
        shapes.append(StepShape.parse(f"prefill {part}", "--prefill"))
    return _alike(shapes, "--batch, --context or --prefill", batch or context or prefill)


def _numbers(option: str, text: str) -> list[int]:
    found = [number for part in text.split(",") if 1 <= (number := tokens_of(part) or 0) <= MOST_TOKENS]
    if len(found) <= text.count(","):
        limit = f"must be numbers from 1 to {MOST_TOKENS} with commas between them"
        raise PolicyError(option, text, limit, "write 1,8,64 or 8k,32k")
    return found


def _alike(shapes: Sequence[StepShape], argument: str, text: object) -> Workload:
    if len(set(shapes)) < len(shapes):
        raise PolicyError(argument, text, "has a shape twice", "write it once")
    return tuple((shape, 1.0) for shape in shapes)


def shapes_for(spec: LayerSpec, workload: Workload) -> Workload:
    """The part of a workload that a layer can meet: an encoder computes all its tokens at once."""
    if not spec.is_encoder and not spec.direct_kv:
        return workload
    return tuple((s, weight) for s, weight in workload if s.phase is Phase.PREFILL and s.query == s.context)


def measurable(spec: LayerSpec, workload: Workload) -> tuple[Workload, str]:
    """The shapes of a layer that can be measured; and why not all, else ""."""
    if spec.sparse is not None or spec.mm_prefix:
        return (
            (),
            f"is {'sparse' if spec.sparse else 'of spans'}: its steps need inputs that no workload describes",
        )
    if spec.state is not None:
        return (), "keeps a state: no workload has the pages of its steps"
    if spec.attn_type == "encoder_decoder":
        return (), "attends an encoder: no workload has its tokens"
    part = shapes_for(spec, workload)
    if spec.mla is not None:
        # Backends prefill latents in unlike parts, some with keys that the engine expands.
        return tuple(
            each for each in part if each[0].phase is Phase.DECODE
        ), "is MLA: only decodes are measured"
    return part, "" if part else "computes all its tokens at once, and the workload has no such prefill"


def layers_of(specs: Mapping[str, LayerSpec], block_size: int | None) -> dict[LayerSpec, list[str]]:
    """The layers of a model by kind, each kind with its names; the layers of a kind differ in their scale at most."""
    from attnplug.registry.measured.tuned import layer_key

    kinds: dict[object, tuple[LayerSpec, list[str]]] = {}
    for name, spec in specs.items():
        asked = spec if not spec.has_pages or block_size is None else spec.replace(block_size=block_size)
        kinds.setdefault((layer_key(asked), asked.block_size), (asked, []))[1].append(name)
    return dict(kinds.values())
