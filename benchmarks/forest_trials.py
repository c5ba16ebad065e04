"""Random forests of shared prefixes and random trees of drafts on one backend, each compared with a float64 oracle.

`python benchmarks/forest_trials.py --backend TORCH --forests 10000 --trees 1000 --seconds 180 --json FILE` goes on where the
file ends. `--device cuda` runs them on a GPU, and TRITON on a CPU is interpreted.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import importlib
import json
import os
import pathlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

LAYERS = 24
"""The layers of all trials: each one compiles kernels of its own on a GPU."""
_MOST_TRIES = 4000
_SPARE = 5
"""Blocks of nobody."""
_MOST_REQUESTS, _MOST_NODES = 9, 16
_HEADS = [(2, 1), (4, 2), (8, 2), (8, 1), (4, 4), (6, 2), (16, 1), (12, 4)]
_HEAD_SIZES = [16, 32, 64, 64, 128, 128, 256]
_FORMATS = ["auto"] * 6 + ["fp8_e4m3", "fp8_e5m2", "int8_token_head", "nvfp4", "rotated4"]
_BLOCK_SIZES = [1, 2, 8, 16, 16, 32, 64, 128, 256]


def drawn_fields(rng: random.Random, sizes: list[int]) -> dict[str, Any]:
    """A random layer: its heads, its mask in blocks, its cap and sinks, and how its pages are stored."""
    heads, kv_heads = rng.choice(_HEADS)
    size = rng.choice(sizes)
    fields: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": rng.choice(_HEAD_SIZES),
        "block_size": size,
        "dtype": rng.choice(["float32", "bfloat16", "float16"]),
        "kv_cache_dtype": rng.choice(_FORMATS),
    }
    mask = rng.choice(["full", "full", "window", "chunk"])
    if mask == "window":
        # Most windows begin inside of a block.
        fields["window"] = (rng.choice([size, 2 * size, 3 * size - 1, rng.randint(1, 4 * size)]), 0)
    if mask == "chunk":
        fields["chunk_size"] = rng.choice([size, 2 * size, 3 * size, rng.randint(1, 4 * size)])
    if rng.random() < 0.4:
        fields["logits_soft_cap"] = rng.choice([3.0, 20.0])
    if rng.random() < 0.4:
        fields["has_sinks"] = True
    return fields


def layers_of(target: Any, count: int, seed: int, refusal: Callable[..., str | None]) -> list[Any]:
    """The first layers of a seed that the backend shares, or verifies trees in."""
    from attnplug.core import LayerSpec
    from attnplug.errors import SpecError

    rng, found = random.Random(seed), list[Any]()
    # On a CPU the time is that of the keys, and small pages have the same borders.
    sizes = _BLOCK_SIZES if target.torch_device != "cpu" else _BLOCK_SIZES[:-4]
    for _ in range(_MOST_TRIES):
        fields = drawn_fields(rng, sizes)
        try:
            spec = LayerSpec(**fields)
        except SpecError:
            continue
        if target.reasons(spec) or refusal(target.backend, spec, target.device, spec.block_size):
            continue
        found.append(spec)
        if len(found) == count:
            break
    if not found:
        raise SystemExit(f"{target.name} on {target.device} serves none of {_MOST_TRIES} drawn layers")
    return found


@dataclasses.dataclass
class Trials:
    """The trials of one kind so far.

    Args:
        done: the number of trials; the next one has this number.
        shared: how many had a shared prefix.
        failures: the number of those that failed.
        first: the text of the first failures, by the number of the trial.
        by_layer: trials by layer.
    """

    done: int = 0
    shared: int = 0
    failures: int = 0
    first: dict[str, str] = dataclasses.field(default_factory=dict)
    by_layer: dict[str, int] = dataclasses.field(default_factory=dict)


class Bench:
    """Runs trials of one backend; runtimes are kept by layer."""

    def __init__(self, target: Any, seed: int, layers: int) -> None:
        from attnplug.core.prefix_sharing import sharing_refusal, tree_refusal

        self.target, self.seed = target, seed
        self.layers = {
            "forests": layers_of(target, layers, seed, sharing_refusal),
            "trees": layers_of(target, layers, seed, tree_refusal),
        }
        self._models: dict[Any, Any] = {}

    def run(self, kind: str, number: int, trials: Trials) -> None:
        """One trial: its requests, their blocks in random order, and NaN in all that is nobody's."""
        from attnplug.testing.conformance.check import ConformanceError
        from attnplug.testing.conformance.serving import forests

        specs = self.layers[kind]
        spec = specs[number % len(specs)]
        rng = random.Random(f"{self.seed} {kind} {number}")
        model = self._model(spec)
        most_new = 3 if kind == "forests" else _MOST_NODES
        requests = forests.random_forest(rng, model.block_size, most_new, rng.randint(3, _MOST_REQUESTS))
        if kind == "trees":
            # At least one request has a tree, and others have chains or decode.
            trees = [at == 0 or rng.random() < 0.6 for at in range(len(requests))]
            requests = [
                dataclasses.replace(each, parents=forests.random_tree(rng, each.new)) if is_tree else each
                for each, is_tree in zip(requests, trees, strict=True)
            ]
        used = sorted({block for each in requests for block in each.blocks})
        order = dict(zip(used, rng.sample(range(1, _blocks(model.block_size)), len(used)), strict=True))
        requests = [dataclasses.replace(each, blocks=[order[b] for b in each.blocks]) for each in requests]
        what = f"{kind} {number} of seed {self.seed}, {_words(spec)}"
        try:
            notes = model.check(requests, number, what, poison=True)
        except ConformanceError as problem:
            trials.failures += 1
            if len(trials.first) < 5:
                trials.first[str(number)] = str(problem)[:600]
        else:
            trials.shared += any("shared prefixes" in note for note in notes)
        trials.done = number + 1
        name = _words(spec)
        trials.by_layer[name] = trials.by_layer.get(name, 0) + 1

    def _model(self, spec: Any) -> Any:
        from attnplug.testing.conformance.serving.forests import ForestModel

        if spec not in self._models:
            size = spec.block_size
            limits = _MOST_REQUESTS, _MOST_REQUESTS * _MOST_NODES, 16 * max(size, _MOST_NODES)
            self._models[spec] = ForestModel(self.target, spec, _blocks(size), *limits)
        return self._models[spec]


def _blocks(size: int) -> int:
    # Three stems of four blocks, and for each request some of its own.
    return 12 + _MOST_REQUESTS * (2 + -(-(_MOST_NODES + 1) // size) + 1) + _SPARE


def _words(spec: Any) -> str:
    """The layer in short: heads, dtype, pages, and what it asks for."""
    parts = [
        f"{spec.num_heads}/{spec.num_kv_heads}/{spec.head_size} {spec.dtype}",
        f"pages of {spec.block_size}",
    ]
    parts += [spec.kv_cache_dtype] if spec.kv_cache_dtype != "auto" else []
    parts += [f"window {spec.window[0]}"] if spec.window[0] >= 0 else []
    parts += [f"chunk {spec.chunk_size}"] if spec.chunk_size is not None else []
    parts += [f"cap {spec.logits_soft_cap:g}"] if spec.logits_soft_cap else []
    return ", ".join([*parts, *(["sinks"] if spec.has_sinks else [])])


def target_of(backend: str, device: str) -> Any:
    """The backend of a name, or of "module:class", on a device of this machine."""
    import attnplug
    from attnplug.registry.devices import resolve_device
    from attnplug.testing.conformance.target import Target

    if ":" in backend:
        module, _, name = backend.partition(":")
        return Target(getattr(importlib.import_module(module), name), resolve_device(device))
    found = attnplug.list_backends().get(backend)
    if found is None:
        raise SystemExit(f"{backend} is not a backend; attnplug list shows the names")
    return Target(found, resolve_device(device))


def main(arguments: list[str] | None = None) -> int:
    """Run trials until all are done or the time is over; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, help="its name, or module:class of one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--path", action="append", default=[], help="folder to import a backend from")
    parser.add_argument("--forests", type=int, default=10_000, help="(default: 10000)")
    parser.add_argument("--trees", type=int, default=1_000, help="(default: 1000)")
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help=f"to draw of each kind (default: {LAYERS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of layers and trials (default: 0)")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no trial after this time")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one trial again, such as trees:17")
    parser.add_argument("--json", type=pathlib.Path, help="the file to go on from, and to write")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    if options.backend == "TRITON" and options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path[:0] = options.path
    import torch
    from installed import versions

    torch.set_num_threads(1)  # more would wait for each other: trials are that small
    bench = Bench(target_of(options.backend, options.device), options.seed, options.layers)
    if options.only:
        kind, _, number = options.only.partition(":")
        alone = Trials()
        bench.run(kind, int(number), alone)
        print(alone.first.get(number, f"{options.only} of {bench.target.name} is right"))
        return alone.failures
    head: dict[str, Any] = {
        "backend": bench.target.name,
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "versions": versions("attnplug", "torch", "triton", "flashinfer-python", "flash-attn"),
        "seed": options.seed,
        "layers": options.layers,
    }
    kinds = {"forests": options.forests, "trees": options.trees}
    found = {kind: Trials() for kind in kinds}
    if options.json and options.json.exists():
        old = json.loads(options.json.read_text())
        if {name: old.get(name) for name in head} != head:
            raise SystemExit(
                f"{options.json} has trials of other versions, layers or seeds; name another file"
            )
        found = {kind: Trials(**old[kind]) for kind in kinds}

    def write() -> None:
        if options.json:
            data = head | {"date": str(dt.date.today())}
            data |= {kind: dataclasses.asdict(trials) for kind, trials in found.items()}
            options.json.write_text(json.dumps(data, indent=1) + "\n")

    # Both kinds advance together, so that a run that ends early has some of each.
    started = collections.Counter({kind: trials.done for kind, trials in found.items()})
    while time.monotonic() - begin < options.seconds:
        left = [kind for kind, count in kinds.items() if found[kind].done < count]
        if not left:
            break
        kind = min(left, key=lambda each: found[each].done / kinds[each])
        bench.run(kind, found[kind].done, found[kind])
        if (found[kind].done % 200) == 0:
            write()
    write()
    seconds = time.monotonic() - begin
    for kind, trials in found.items():
        print(
            f"{bench.target.name}: {trials.done} of {kinds[kind]} {kind}, {trials.done - started[kind]} now, "
            f"{trials.shared} with shared prefixes, {trials.failures} failed"
        )
        for number, text in trials.first.items():
            print(f"  the first of them, number {number}: {text}" if text else number)
            break
    print(f"{seconds:.0f} s")
    return int(any(trials.failures for trials in found.values()))


if __name__ == "__main__":
    sys.exit(main())
