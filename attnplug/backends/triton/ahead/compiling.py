"""Compiles forms of kernels for a chip that need not be there, and compares what they take with what the chip has."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import multiprocessing
import re
from collections.abc import Iterator, Sequence

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager

from attnplug.backends.triton.ahead import host_modules
from attnplug.backends.triton.ahead.chips import Chip
from attnplug.backends.triton.ahead.forms import Form
from attnplug.core.compiled import CompiledKernel
from attnplug.core.interface.guarded import describe, guarded_call

_UNITS = 4
"""Groups of registers in a multiprocessor of AMD, each for every fourth warp."""


def target_of(chip: Chip) -> GPUTarget:
    """The chip, as Triton's compiler takes it."""
    if chip.is_nvidia:
        return GPUTarget("cuda", chip.device_number, chip.warp_size)
    return GPUTarget("hip", chip.arch, chip.warp_size)


def is_cached(form: Form, chip: Chip) -> bool:
    """Whether Triton's cache on disk has the form, and what launches it."""
    backend = make_backend(target_of(chip))
    options = backend.parse_options(dict(form.options.__dict__))
    key = get_cache_key(form.source, backend, options, env_vars=get_cache_invalidating_env_vars())
    folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    found = folder.get_group(f"{form.source.name[:150]}.json") is not None
    return found and (not host_modules.are_for(chip) or host_modules.are_cached(form))


def compile_form(form: Form, chip: Chip, *, again: bool = True) -> CompiledKernel:
    """Compile one form; an error of the compiler is the reason of a refusal.

    Args:
        form: the kernel.
        chip: for which.
        again: whether a form in Triton's cache is compiled too; if not, registers and spills are not counted, and what
            launches the form is compiled with it.
    """
    key, kernel = form.key, str(form)
    log = io.StringIO()
    # What the assembler says is not in Triton's cache.
    with _knobs(again), contextlib.redirect_stdout(log):
        options = form.options.__dict__
        made, problem = guarded_call(triton.compile, form.source, target=target_of(chip), options=options)
    if problem is not None:
        return CompiledKernel(key, kernel, refused=f"the compiler refuses it: {describe(problem)}")
    if not again:
        if host_modules.are_for(chip):
            host_modules.compile_modules(form)
        return judged(CompiledKernel(key, kernel, shared=made.metadata.shared), chip)
    registers, spilled = _nvidia(log.getvalue()) if chip.is_nvidia else _amd(made.asm["amdgcn"])
    threads = made.metadata.num_warps * chip.warp_size
    return judged(CompiledKernel(key, kernel, threads, registers, made.metadata.shared, spilled), chip)


@contextlib.contextmanager
def _knobs(again: bool) -> Iterator[None]:
    with knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.compilation.always_compile = again
        knobs.nvidia.dump_ptxas_log = True
        yield


def judged(found: CompiledKernel, chip: Chip) -> CompiledKernel:
    """`found`, with the reason why it does not fit the chip, if it does not."""
    why = ""
    if found.shared > chip.shared_memory:
        why = f"it takes {found.shared:,} bytes of shared memory; {chip.arch} has {chip.shared_memory:,}"
    elif found.registers > chip.most_registers:
        why = f"its threads have {found.registers} registers; {chip.arch} has {chip.most_registers}"
    elif (room := _threads(found.registers, chip)) < found.threads:
        why = (
            f"it has {found.threads} threads of {found.registers} registers; {chip.arch} has room for {room}"
        )
    return dataclasses.replace(found, refused=why)


def _threads(registers: int, chip: Chip) -> int:
    """The threads of so many registers that a multiprocessor has room for."""
    if chip.is_nvidia:
        return chip.registers // max(registers, 1)
    return _UNITS * chip.warp_size * (chip.most_registers // max(registers, 1))


def _nvidia(log: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of those that it writes to memory, of what ptxas says."""
    registers = re.findall(r"Used (\d+) registers", log)
    return max(map(int, registers)), sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))


def _amd(assembly: str) -> tuple[int, int]:
    """Vector registers of a thread, and bytes of those that are kept in memory; scalar ones go to vector registers."""
    count, spilled = (
        int(re.findall(rf"\.{name}:\s*(\d+)", assembly)[-1]) for name in ("vgpr_count", "vgpr_spill_count")
    )
    return count, 4 * spilled


_work: list[tuple[Form, Chip]] = []


def compile_all(
    work: Sequence[tuple[Form, Chip]], jobs: int, *, again: bool = True
) -> Iterator[CompiledKernel]:
    """Compile each form for its chip in `jobs` processes, as compile_form; the results are in the order of `work`."""
    if jobs == 1 or len(work) < 2:
        for each in work:
            yield compile_form(*each, again=again)
        return
    # Forked, because constants of kernels may be functions, which cannot be sent.
    _work[:] = work
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(functools.partial(_compile, again=again), range(len(work)))


def _compile(place: int, *, again: bool) -> CompiledKernel:
    return compile_form(*_work[place], again=again)
