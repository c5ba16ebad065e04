"""`attnplug warm`: compiles the kernels that a model will launch, before the first request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from attnplug.cli.arguments import (
    BackendRules,
    BlockSize,
    ConfigPath,
    DeviceText,
    KVCacheDtype,
    ModelDtype,
    OptionTexts,
    Quiet,
    TensorParallel,
    jobs_option,
)
from attnplug.cli.commands.matrix_compile import check_compiler
from attnplug.cli.output.output import echo
from attnplug.cli.output.run_report import counted, waiting
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnplug.backends.triton.ahead.chips import Chip
    from attnplug.backends.triton.ahead.forms import Form
    from attnplug.core.device import Device
    from attnplug.runtime.plan.model_plan import ModelPlan

_COLD, _DOES_NOT_FIT = 1, 4
_BLOCKS = 4
"""Dummy steps read the null block alone."""


def warm(
    config: ConfigPath,
    device: DeviceText = "current",
    tp: TensorParallel = 1,
    dtype: ModelDtype = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    block_size: BlockSize = None,
    backend: BackendRules = None,
    option: OptionTexts = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most requests of a step, as the engine has it.")
    ] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most tokens of a step, as the engine has it.")
    ] = 8192,
    speculative: Annotated[
        int, typer.Option("--num-speculative-tokens", min=0, metavar="N", help="Draft tokens of a request.")
    ] = 0,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The cache of kernels \\[default: TRITON_CACHE_DIR, else Triton's]"
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compile nothing; list the kernels that are cold.")
    ] = False,
    jobs: Annotated[int | None, jobs_option("Compiling")] = None,
    _quiet: Quiet = False,
) -> None:
    """Compile the kernels of TRITON that a model will launch, in parallel, for a GPU that need not be here.

    They are those of AttentionRuntime.warm_up with the same limits. The cache is Triton's, whose entries have the version of Triton and the GPU in their names, so it can be copied into an image: set TRITON_CACHE_DIR to it there.

    Exit codes: 0 all kernels are warm, 1 with --check some are cold, 4 a kernel does not fit the GPU, 3 a layer without a backend, 2 bad usage.
    """
    check_compiler("warm")
    from triton import knobs

    from attnplug.backends.triton.ahead.compiling import compile_all
    from attnplug.backends.triton.ahead.host_modules import are_cached, c_compiler
    from attnplug.registry.devices import resolve_device

    where = resolve_device(device)
    if cache is not None:
        knobs.cache.dir = str(cache.absolute())
    limits = BuilderConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=speculative,
    )
    reading = {"tensor_parallel_size": tp, "kv_cache_dtype": kv_cache_dtype, "dtype": dtype}
    chip, forms, cold, others = kernels_of(
        config, where, limits, backend=backend, option=option, block_size=block_size, **reading
    )
    for name, count in others.items():
        echo(f"{counted(count, 'layer')} on {name}, whose kernels are not compiled ahead", err=True)
    if forms is None:
        return
    echo(f"{counted(len(forms), 'kernel')} for {where}: {len(forms) - len(cold)} warm, {len(cold)} cold")
    if check:
        for form in cold:
            echo(f"cold: {form}")
        raise typer.Exit(_COLD if cold else 0)
    refused = 0
    for made in compile_all([(form, chip) for form in cold], jobs or os.cpu_count() or 1, again=False):
        refused += bool(made.refused)
        if made.refused:
            echo(str(made), err=True)
    if cold:
        echo(f"compiled {len(cold) - refused} into {knobs.cache.dir}")
    if chip.is_nvidia and not all(map(are_cached, forms)):
        why = "no C compiler is here (CC, gcc, clang)" if c_compiler() is None else "the C compiler fails"
        echo(f"{why}, so Triton compiles its launchers at the first launch", err=True)
    raise typer.Exit(_DOES_NOT_FIT if refused else 0)


class Kernels(NamedTuple):
    """The kernels that a model will launch.

    Args:
        chip: they are for.
        forms: all of them; None if TRITON serves no layer.
        cold: those that the cache lacks.
        others: the number of layers of each other backend.
    """

    chip: Chip
    forms: Sequence[Form] | None
    cold: Sequence[Form]
    others: Mapping[str, int]


def kernels_of(
    config: Path,
    where: Device,
    limits: BuilderConfig,
    *,
    backend: str | None = None,
    option: Any = None,
    block_size: int | None = None,
    **reading: Any,
) -> Kernels:
    """The kernels of TRITON that a model will launch on a device, and those that are cold.

    Raises:
        PolicyError: a device for which no kernels are compiled ahead, or layers that share pages between backends.
        ModelConfigError, NoBackendError: as `attnplug.plan` and `read_config`.
    """
    from attnplug.backends.triton.ahead.chips import chip_of
    from attnplug.backends.triton.ahead.compiling import is_cached
    from attnplug.registry.devices import is_here
    from attnplug.runtime.kernels_ahead import launches_of

    chip = chip_of(where)
    if is_here(where):
        import torch

        # Models of one architecture have unlike numbers of them.
        here = torch.cuda.get_device_properties(torch.cuda.current_device())
        chip = chip._replace(multiprocessors=here.multi_processor_count)
    plan, others = _plan(config, where, backend, option, block_size, **reading)
    if plan is None:
        return Kernels(chip, None, (), others)
    forms = list(launches_of(plan, limits, chip))
    return Kernels(chip, forms, [form for form in forms if not is_cached(form, chip)], others)


def _plan(
    config: Path, device: Device, backend: str | None, option: Any, block_size: int | None, **reading: Any
) -> tuple[ModelPlan | None, dict[str, int]]:
    """The plan of the layers that TRITON serves in a phase, and the layers of other backends."""
    import attnplug
    from attnplug.cli.arguments import settings
    from attnplug.integrations.transformers import read_config

    with waiting(f"Running {config} once without weights, to see each layer's attention"):
        model = read_config(config, **reading)
    specs = {
        name: spec if not spec.has_pages or block_size is None else spec.replace(block_size=block_size)
        for name, spec in model.layers.items()
    }
    # What is installed here will be in the image, so nothing else is assumed.
    asked = settings(backend, option, None, None, None, False, device="cpu")
    chosen = attnplug.plan(specs, device, kv_sharing=model.kv_sharing, **asked)
    names = {name: str(decision.backend).split("+") for name, decision in chosen.decisions.items()}
    own = {name: spec for name, spec in specs.items() if "TRITON" in names[name]}
    others: dict[str, int] = {}
    for parts in names.values():
        for part in set(parts) - {"TRITON"}:
            others[part] = others.get(part, 0) + 1
    if not own:
        return None, others
    if set(own) != set(specs) and model.kv_sharing:
        limit = "has layers of several backends that share pages, whose kernels are not compiled ahead"
        raise PolicyError("CONFIG", str(config), limit, "add --backend TRITON")
    asked["backend"] = "TRITON"
    return attnplug.plan(own, device, kv_sharing=model.kv_sharing, num_blocks=_BLOCKS, **asked), others
