"""Helpers of launches: kernels with bound arguments, the current device, powers of two, watching compilation."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from triton import knobs
from triton.language.extra import cuda
from triton.runtime import driver


class BoundKernel:
    """A kernel whose later arguments stay the same from launch to launch.

    Triton inspects every argument of every launch to find the compiled kernel, about 20 us of the host per call. Here
    only the device and the alignment of the given tensors can differ, so they are the key of the compiled kernels.

    Args:
        kernel: made by `triton.jit`.
        given: the number of first parameters that each launch gives: tensors, always of the same dtypes, then
            32-bit integers on which the kernel is not specialised.
        values: the other arguments by name; other names are ignored.
        options: of the compiler, such as num_warps.
    """

    __slots__ = ("_bound", "_compiled", "_kernel", "_options", "siblings")

    def __init__(self, kernel: Any, given: int, values: Mapping[str, Any], **options: int) -> None:
        self._kernel = kernel
        self._bound = tuple(values[name] for name in _parameters(kernel.fn)[given:])
        # Triton's compiler for AMD has no limit of registers, and refuses the option.
        if torch.version.hip is not None:
            options.pop("maxnreg", None)
        self._options = options
        self._compiled: dict[tuple[int, ...], Any] = {}
        self.siblings: tuple[BoundKernel, ...] = ()
        """Kernels that other steps launch with such tensors: they are compiled when this one is."""

    def __call__(self, grid: tuple[int, ...], *given: Any) -> None:
        """Launch on the current device, which must be that of the given tensors."""
        arguments = (*given, *self._later(given))
        # Triton's interpreter runs on host tensors, and compiles nothing that could be kept.
        if not given[0].is_cuda:
            self._kernel[grid](*arguments, **self._options)
            return
        form = _form(given)
        compiled = self._compiled.get(form)
        if compiled is None:
            self._compiled[form] = self._kernel[grid](*arguments, **self._options)
            for other in self.siblings:
                other._compile(form, given)
        # Only Triton's public launcher calls the hooks of a profiler.
        elif _listened_to():
            compiled[(*grid, 1, 1)[:3]](*arguments)
        else:
            # Triton's private launcher (requires triton>=3.4): its public one makes metadata for profilers first,
            # half of a launch's time.
            active: Any = driver.active
            stream = active.get_current_stream(form[0])
            size, known = (*grid, 1, 1)[:3], (compiled.function, compiled.packed_metadata)
            compiled.run(*size, stream, *known, None, None, None, *arguments)

    def compile(self, *given: Any) -> None:
        """Compile what a launch with such tensors needs, without it; nothing is compiled for host tensors."""
        if given[0].is_cuda:
            for each in (self, *self.siblings):
                each._compile(_form(given), given)

    def _later(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments that follow those given."""
        return self._bound

    def _compile(self, form: tuple[int, ...], given: tuple[Any, ...]) -> None:
        if form not in self._compiled:
            self._kernel.warmup(*given, *self._later(given), grid=(1,), **self._options)
            # Only Triton's public launcher loads the binary.
            self._compiled[form] = None


class DerivingKernel(BoundKernel):
    """A kernel with arguments that are made of those given: descriptors of tensors, which Triton takes as they are.

    Args:
        kernel: made by `triton.jit`.
        given: as of BoundKernel.
        derive: makes the parameters that follow from the given ones.
        derived: their number.
        values: the other arguments by name.
        options: of the compiler.
    """

    __slots__ = ("_derive",)

    def __init__(
        self,
        kernel: Any,
        given: int,
        derive: Callable[[tuple[Any, ...]], tuple[Any, ...]],
        derived: int,
        values: Mapping[str, Any],
        **options: int,
    ) -> None:
        super().__init__(kernel, given + derived, values, **options)
        self._derive = derive

    def _later(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*self._derive(given), *self._bound)


def compile_together(kernels: Iterable[BoundKernel]) -> None:
    """Make kernels siblings: the first launch or compilation of one compiles all."""
    every = tuple(kernels)
    for kernel in every:
        kernel.siblings = every


def prepare(device: torch.device) -> None:
    """Do now what Triton does once in a process before its first kernel on a GPU, and what takes longest of it."""
    if device.type == "cuda":
        _read_triton()


@functools.cache
def _read_triton() -> None:
    # A part of each key of its cache: Triton reads all of its own files for it, some 400 MB. Versions move the function.
    with suppress(ImportError, AttributeError):
        importlib.import_module("triton.runtime.cache").triton_key()
    # Triton imports Gluon to look at the arguments of its first launch: 0.16 of 0.31 s.
    with suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")


def _form(given: tuple[Any, ...]) -> tuple[int, ...]:
    """The device of a launch's tensors, and which of them begin at multiples of 16 bytes."""
    # Triton compiles loads for such pointers apart from the others.
    return (given[0].get_device(), *[not each.data_ptr() & 15 for each in given if type(each) is not int])


def _listened_to() -> bool:
    """Whether a hook, such as that of Triton's profiler, listens to launches."""
    # Some versions of Triton have a chain of hooks there, with `calls`, and others one hook or None.
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Makes the device of `tensor` current, because Triton launches there; does nothing for a host tensor."""
    index = tensor.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return _HERE
    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard


# One object for all launches, because it has no state.
_HERE = nullcontext()


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one that it waits for ends: `launch_pdl` and `gdc_wait` of Triton."""
    wait = getattr(cuda, "gdc_wait", None)
    # Triton 3.4 has the functions with a parameter that its own compiler does not know.
    if wait is None or "_semantic" not in inspect.signature(wait).parameters:
        return False
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`, which is positive."""
    return 1 << (size - 1).bit_length()


@contextmanager
def watch_compiling() -> Iterator[list[str]]:
    """Inside, the list grows by every kernel that is compiled, or loaded from Triton's cache on disk.

    An entry has the kernel's name and its constants except None and False: "prefill_kernel(GROUP=4, BLOCK_M=16)".
    """
    watch = _Watch(knobs.runtime.jit_post_compile_hook)
    knobs.runtime.jit_post_compile_hook = watch
    try:
        yield watch.found
    finally:
        watch.is_open = False
        hook = knobs.runtime.jit_post_compile_hook
        # A watch that began later calls this one, so the last of them to end removes both.
        while isinstance(hook, _Watch) and not hook.is_open:
            hook = hook.before
        knobs.runtime.jit_post_compile_hook = hook


class _Watch:
    """A hook of Triton that notes attnplug's kernels, and calls the hook that was there before."""

    def __init__(self, before: Any) -> None:
        self.before, self.is_open = before, True
        self.found: list[str] = []

    def __call__(self, *arguments: Any, **facts: Any) -> Any:
        function = facts["fn"]
        if self.is_open and function.module.startswith("attnplug."):
            self.found.append(_name(function.jit_function, facts["compile"]["constants"]))
        return None if self.before is None else self.before(*arguments, **facts)


def _name(function: Any, constants: Any) -> str:
    names = function.arg_names
    sizes = [(path if isinstance(path, str) else names[path[0]], value) for path, value in constants.items()]
    shown = ", ".join(f"{name}={value}" for name, value in sizes if value not in (None, False))
    return f"{function.__name__}({shown})"
