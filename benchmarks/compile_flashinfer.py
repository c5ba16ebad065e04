"""Builds the FlashInfer modules that a run will need, several at once: a rented GPU starts with none.

Run as `python benchmarks/compile_flashinfer.py [--kit smoke|full] [MODEL ...] [--prefill auto|fa2|fa3] [--list]`:
what the conformance kit runs at a level, and the layers of models: a config.json, or the folder it is in.
With `FLASHINFER_CUDA_ARCH_LIST=9.0a` and `--device sm90` it builds for another GPU than this machine's, or without one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch

from attnplug.backends.flashinfer import FlashInferBackend
from attnplug.backends.flashinfer.compiling import build_modules
from attnplug.backends.flashinfer.impl import FlashInferImpl
from attnplug.backends.flashinfer.latent_backend import FlashInferMLABackend
from attnplug.backends.flashinfer.library import library
from attnplug.backends.flashinfer.modules import LatentModule, Module
from attnplug.backends.flashinfer.options import Options
from attnplug.core import Device, LayerSpec, Phase
from attnplug.registry.devices import resolve_device
from attnplug.testing import layer_tensors
from attnplug.testing.conformance import Level
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.check import CheckSkipped
from attnplug.testing.conformance.target import Target

PHASES = ("decode", "prefill")
ALONE: tuple[dict[str, Any], ...] = (
    {},
    {"window": (6, 0)},
    {"logits_soft_cap": 3.0},
    {"window": (6, 0), "logits_soft_cap": 3.0},
    {"has_sinks": True},
    {"window": (6, 0), "has_sinks": True},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"kv_cache_dtype": "fp8_e5m2"},
)
"""The steps that checks run on the plainest layer, in addition to the designed cases."""


def kit_layers(target: Target) -> Iterator[LayerSpec]:
    """The layers that the kit's checks run, but for a few pairs of features, which then compile when they are met."""
    for fields in ALONE:
        try:
            yield target.spec(**fields)
        except CheckSkipped:
            continue
    yield from (case.spec for case in designed_cases(target))


def model_layers(name: str, device: Device) -> Iterator[LayerSpec]:
    """The layers of a model that FLASHINFER serves on a device."""
    from attnplug.integrations.transformers import read_config

    for spec in read_config(name).layers.values():
        phase = None if spec.mla is None else Phase.DECODE
        if not FlashInferBackend.for_layer(spec).validate_configuration(spec, device, phase):
            yield spec


def latent_module(dtype: object, device: Device) -> LatentModule:
    """The kernels that decode over latents of 512 + 64."""
    hopper = device.capability is not None and device.capability[0] == 9
    sizes = FlashInferMLABackend.latent_sizes[0]
    return LatentModule("fa3" if hopper else "fa2", getattr(torch, str(dtype)), sizes)


def modules_of(spec: LayerSpec, device: Device, options: Options) -> list[Module | LatentModule]:
    """The kernels that serve a layer in both phases, or decode its latents."""
    if spec.mla is not None:
        return [latent_module(spec.dtype, device)]
    impl = FlashInferImpl.from_spec(
        spec, backend=FlashInferBackend, layer_name="layer", tensors=layer_tensors(spec), options=options
    )
    if spec.has_quantized_kv_cache and options.prefill_backend == "fa3":
        return []  # refused
    return [impl.plan_group.module(phase, device) for phase in PHASES]


def wanted(arguments: argparse.Namespace, device: Device) -> list[Module | LatentModule]:
    """The modules asked for, each once."""
    layers: list[LayerSpec] = []
    latents: list[Module | LatentModule] = []
    if arguments.kit:
        latents = [latent_module(dtype, device) for dtype in FlashInferMLABackend.supported_dtypes]
        layers += kit_layers(Target(FlashInferBackend, device, Level(arguments.kit)))
    for name in arguments.models:
        layers += model_layers(name, device)
    options = Options(prefill_backend=arguments.prefill)
    found = [each for spec in layers for each in modules_of(spec, device, options)]
    return list(dict.fromkeys([*latents, *found]))


def main() -> None:
    """List the modules, or build those that are not built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--kit", choices=[str(level) for level in Level])
    parser.add_argument("--device", help="default: this machine's")
    parser.add_argument("--prefill", choices=("auto", "fa2", "fa3"), default="auto")
    parser.add_argument("--jobs", type=int, help="processors to keep busy; default: all")
    parser.add_argument("--list", action="store_true", help="print the modules and build none")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    modules = wanted(arguments, device)
    print(f"{len(modules)} modules on {device}")
    if arguments.list:
        print("\n".join(f"  {module}" for module in modules))
        return
    began = time.perf_counter()

    def report(module: Module | LatentModule, seconds: float) -> None:
        print(f"  {seconds:6.1f} s  {module}", flush=True)

    built = build_modules(library(), modules, jobs=arguments.jobs, done=report)
    print(
        f"{len(built)} built in {time.perf_counter() - began:.0f} s, {len(modules) - len(built)} were there"
    )


if __name__ == "__main__":
    main()
