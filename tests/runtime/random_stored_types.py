"""Random names of stored types, mixed over layers: what selection says of each layer, the plan and the runtime say too.

`python tests/runtime/random_stored_types.py --plans 10000` runs them from a shell and prints what became of them.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import string
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "registry"))
from fake_plugins import backend, plugin
from served_model import ServedModel

from attnplug import LayerSpec, Registry, plan
from attnplug.backends.torch_native import TorchBackend
from attnplug.core.errors import AttnplugError, LayoutError, NoBackendError, SpecError
from attnplug.core.kv_format import kv_cache_dtypes
from attnplug.runtime import ModelPlan

OPEN = ("acme_open", "nvfp4_rows", "int8_blocks", "fp8_inc", "fp8_ds_mla", "int4", "uint8")
"""Names without bytes, or with those of a kernel that nobody has, which a careless backend declares."""


@dataclasses.dataclass
class Found:
    """What became of the models: counts, and the seeds whose answers disagree with what each said."""

    served: int = 0
    steps: int = 0
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    stored: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    disagree: dict[int, str] = dataclasses.field(default_factory=dict)


def random_name(draw: random.Random) -> str:
    """A name that exists, one that is nearly so, one that a plugin may have, or any text."""
    known = draw.choice(kv_cache_dtypes())
    if draw.random() < 0.7:
        return known
    spoiled = [f"{known}_x", f"x{known}", known.upper(), known[:-1], f" {known}", known.replace("_", "-")]
    letters = draw.choices(string.ascii_lowercase + string.digits + "_", k=draw.randint(1, 12))
    return draw.choice([*OPEN, draw.choice(spoiled), "".join(letters)])


def random_layers(draw: random.Random) -> dict[str, LayerSpec]:
    """One to four layers of one model, each with a stored type of its own; SpecError as LayerSpec."""
    heads, kv_heads = draw.choice([(4, 2), (2, 2), (6, 3)])
    size, dtype = draw.choice([16, 20, 32, 64, 80, 96]), draw.choice(["float32", "bfloat16", "float16"])
    fields = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "dtype": dtype}
    kinds = [{}, {}, {"sliding_window": 20}, {"head_size_v": 32}, {"causal": False}]
    names = [random_name(draw) for _ in range(draw.randint(1, 2))]
    return {
        f"layers.{index}": LayerSpec(**fields | draw.choice(kinds) | {"kv_cache_dtype": draw.choice(names)})
        for index in range(draw.randint(1, 4))
    }


def run(seeds: range, registry: Registry) -> Found:
    """Ask for each model in all three ways, and run one step of every sixth that is served."""
    found = Found()
    for seed in seeds:
        draw = random.Random(seed)
        try:
            specs = random_layers(draw)
        except SpecError as problem:
            found.refused[f"layer: {problem.field}"] += 1
            continue
        try:
            problem = disagreement(specs, registry, found, with_step=seed % 6 == 0)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            stored = {name: spec.kv_cache_dtype for name, spec in specs.items()}
            found.disagree[seed] = f"{stored}: {problem}"
    return found


def disagreement(specs: dict[str, LayerSpec], registry: Registry, found: Found, *, with_step: bool) -> str:
    """What the plan or the runtime says of a model and selection does not; "" if they agree."""
    decisions = {name: registry.explain(spec, "cpu", layer_name=name) for name, spec in specs.items()}
    refused = sorted(name for name, decision in decisions.items() if decision.backend is None)
    try:
        made = plan(specs, "cpu", num_blocks=64, registry=registry)
    except NoBackendError as error:
        found.refused["selection and plan"] += 1
        return "" if refused else f"selection takes all layers, and the plan says: {error}"
    except LayoutError as error:
        # Selection chooses backends, and the plan a pool. The pages of unlike formats may not share one.
        found.refused[f"pages: {error.field}"] += 1
        is_about_pages = (
            error.field == "page_size_bytes" and len({each.kv_cache_dtype for each in specs.values()}) > 1
        )
        return "" if is_about_pages and not refused else f"the plan says: {error}"
    except AttnplugError as error:
        return f"selection takes {sorted(set(specs) - set(refused))}, and the plan says: {error}"
    if refused:
        return f"selection refuses {refused}, and the plan takes them"
    unlike = [name for name, each in decisions.items() if each.backend != made.decisions[name].backend]
    if unlike:
        return f"selection and plan have other backends for {unlike}"
    found.served += 1
    found.stored.update(spec.resolved_kv_cache_dtype for spec in specs.values())
    return step(specs, made, found) if with_step else ""


def step(specs: dict[str, LayerSpec], made: ModelPlan, found: Found) -> str:
    """One step of two requests through every layer, against the oracle; "" if its numbers are right."""
    if any(decision.backend != "TORCH" for decision in made.decisions.values()):
        return ""  # what the careless backend computes is no question here
    scales = (0.5, 2.0) if any(spec.has_kv_scales for spec in specs.values()) else (1.0, 1.0)
    model = ServedModel(specs, planned=made, scales=scales, max_model_len=32)
    model.add("a")
    model.add("b")
    model.step(a=5, b=3)
    found.steps += 1
    return ""


def registry_of_all() -> Registry:
    """The built-in backends, and before them one that takes every stored type by its name."""
    made = Registry()
    types = ("auto", "fp8", "fp8_e4m3", "int8", *OPEN)
    made.register(
        plugin(backend("CARELESS", 300, base=TorchBackend, supported_kv_cache_dtypes=types)), "careless"
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=10000)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    found = run(range(asked.first, asked.first + asked.plans), registry_of_all())
    print(found)
    sys.exit(bool(found.disagree))


if __name__ == "__main__":
    main()
