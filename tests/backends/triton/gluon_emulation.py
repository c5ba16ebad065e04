"""Runs kernels written in Gluon on a CPU: their Python functions, over stand-ins for the language.

Groups of warps are threads that meet at barriers only. Copies are done when they are waited for, and products at once, so what
is checked is the arithmetic, every address, that no group waits for ever, and that copies are there when the others read them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from attnplug.backends.triton.kernels import scan as kernels

KERNELS = "attnplug.backends.triton.kernels.hopper"
_SECONDS = 10.0
_here = threading.local()


@dataclasses.dataclass(frozen=True)
class Type:
    """An element type."""

    dtype: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.dtype.itemsize


NAMES = {
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "float32": torch.float32,
}
NAMES |= {"bfloat16": torch.bfloat16, "float8e4nv": torch.float8_e4m3fn, "float8e5": torch.float8_e5m2}
# torch has little arithmetic without signs; the kernels cast positions that are not negative.
NAMES |= {"uint32": torch.int64}


class Values(torch.Tensor):
    """A tensor in registers."""

    def to(self, to: Any, bitcast: bool = False) -> Any:  # type: ignore[override]
        # Kernels name a type of the language, or that of a tensor.
        kind = getattr(to, "dtype", to)
        return self.view(kind) if bitcast else super().to(kind)


def values(tensor: Any) -> Any:
    return torch.as_tensor(tensor).as_subclass(Values)


class Pointer:
    """Elements of a tensor's memory, by their offsets."""

    def __init__(self, memory: torch.Tensor, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets
        self.dtype = SimpleNamespace(element_ty=Type(memory.dtype), is_ptr=lambda: True)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + more)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.offsets[index])

    def to(self, kind: Type, bitcast: bool) -> Pointer:
        assert bitcast
        ratio = kind.dtype.itemsize // self.memory.dtype.itemsize
        assert bool((self.offsets % ratio == 0).all())
        return Pointer(self.memory.view(kind.dtype), self.offsets // ratio)


def pointer_to(tensor: torch.Tensor) -> Pointer:
    """A pointer to the first element; everything behind it in the tensor's storage is in reach."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return Pointer(whole, tensor.storage_offset())


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    offsets = torch.as_tensor(pointer.offsets)
    if mask is None:
        return values(pointer.memory[offsets.long()].clone())
    offsets, there = torch.broadcast_tensors(offsets, torch.as_tensor(mask))
    found = pointer.memory[torch.where(there, offsets, 0)]
    return values(torch.where(there, found, torch.tensor(other, dtype=found.dtype)))


def store(pointer: Pointer, value: Any, mask: Any) -> None:
    offsets, there, value = torch.broadcast_tensors(
        pointer.offsets, torch.as_tensor(mask), torch.as_tensor(value)
    )
    pointer.memory[offsets[there]] = value[there].as_subclass(torch.Tensor)


class Buffer:
    """Shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.dtype, self.shape = data, Type(data.dtype), list(data.shape)
        self.type = SimpleNamespace(layout=None)

    def index(self, number: Any) -> Buffer:
        return Buffer(self.data[int(number)])

    def permute(self, order: tuple[int, ...]) -> Buffer:
        return Buffer(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int) -> Buffer:
        return Buffer(self.data.narrow(dim, start, length))

    def load(self, layout: Any) -> Any:
        return values(self.data.clone())

    def store(self, value: Any) -> None:
        assert value.dtype == self.data.dtype
        assert list(value.shape) == self.shape
        self.data.copy_(value)

    def _reinterpret(self, kind: Type, shape: list[int], layout: Any) -> Buffer:
        return Buffer(self.data.view(kind.dtype).view(shape))


class Barrier:
    """An mbarrier: a phase ends after `count` arrivals."""

    def __init__(self) -> None:
        self.changed, self.count, self.arrived, self.phase = threading.Condition(), 0, 0, 0
        self.missing = 0

    def expect(self, size: int) -> None:
        """An arrival that counts once `size` bytes are copied."""
        assert self.missing == 0
        self.missing = size

    def copied(self, size: int) -> None:
        self.missing -= size
        assert self.missing >= 0
        if self.missing == 0:
            self.arrive(1)

    def arrive(self, count: int) -> None:
        with self.changed:
            self.arrived += count
            assert self.arrived <= self.count
            if self.arrived == self.count:
                self.arrived, self.phase = 0, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: (self.phase & 1) != int(parity), _SECONDS):
                raise TimeoutError("a group of warps waits for ever")


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, shape: list[int]) -> None:
        self.each = [Barrier() for _ in range(shape[0])]

    def index(self, number: Any) -> Barriers:
        one = Barriers([0])
        one.each = [self.each[int(number)]]
        return one


def allocate(kind: Type, shape: list[int], layout: Any) -> Buffer | Barriers:
    if layout == "barrier":
        return Barriers(shape)
    # What nobody has written yet is not zero.
    made = torch.full(shape, torch.nan, dtype=kind.dtype)
    return Buffer(made)


def multiply(a: Any, b: Buffer, acc: Any, *, use_acc: bool = True, is_async: bool) -> Any:
    assert is_async
    left = a.data if isinstance(a, Buffer) else a
    found = values(left.float() @ b.data.float())
    return acc + found if use_acc else found


def specialize(groups: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    assert len(warps) == len(registers) == len(groups) - 1
    problems: list[BaseException] = []

    def run(function: Callable[..., None], arguments: tuple[Any, ...], place: Any) -> None:
        _here.place, _here.grid = place
        try:
            function(*arguments)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(*group, (_here.place, _here.grid))) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def converted(text: str, _: str, given: list[torch.Tensor], *, dtype: Any, pack: int, is_pure: bool) -> Any:
    """The pieces of assembly of the kernels: they narrow numbers to 16 bits and pair them, or widen 8 bits, or exchange."""
    if found := re.match(r"cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$2, \$1;", text):
        narrow = {"bf16": torch.bfloat16, "f16": torch.float16}[found[1]]
        return values(
            torch.stack([each.as_subclass(torch.Tensor).to(narrow) for each in given], -1).view(torch.int32)[
                ..., 0
            ]
        )
    if text.startswith("rcp.approx"):
        return values(1.0 / given[0])
    if text == "mov.b32 {$0, $1}, $2;":
        both = given[0].as_subclass(torch.Tensor).unsqueeze(-1).view(torch.int16)
        return values(both[..., 0]), values(both[..., 1])
    if text.startswith("shfl.sync.bfly"):
        # Columns beside each other are those of threads beside each other.
        columns, distance = given
        return values(columns[..., torch.arange(columns.shape[-1]) ^ distance])
    stored = torch.float8_e4m3fn if "e4m3" in text else torch.float8_e5m2
    given = [each.as_subclass(torch.Tensor).contiguous() for each in given]
    if len(given) == 2:
        assert pack == 4
        # Of every four elements, the first two of either are one result.
        even, odd = (each.to(torch.float16).unflatten(-1, (-1, 2, 2)) for each in given)
        pairs = torch.stack((even, odd), -1)
        return tuple(values(pairs[..., part, :, :].flatten(-3)) for part in range(2))
    if given[0].dtype == stored:
        assert pack == 4
        return values(given[0].to(torch.float16))
    assert pack == 1
    halves = given[0].view(stored).to(torch.float16).view(torch.int32).unflatten(-1, (-1, 2))
    return values(halves[..., 0]), values(halves[..., 1])


def linear_layout(*bases: Any) -> None:
    """Checks that the elements of each thread together are a whole tensor."""
    *each, shape = bases
    places = {(0,) * len(shape)}
    for basis in itertools.chain(*each):
        places |= {tuple(one ^ other for one, other in zip(place, basis, strict=True)) for place in places}
    assert places == set(itertools.product(*(range(size) for size in shape)))


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: values(function(*(torch.as_tensor(each) for each in arguments)))


def language() -> ModuleType:
    """A stand-in for `triton.experimental.gluon.language`."""
    gl: Any = ModuleType("gl")
    for name, dtype in NAMES.items():
        setattr(gl, name, Type(dtype))
    for name in ("minimum", "maximum", "exp2", "log2", "floor", "abs"):
        setattr(gl, name, _elementwise(getattr(torch, name)))
    gl.where = lambda mask, one, other: values(torch.where(torch.as_tensor(mask), one, other))
    gl.max = lambda tensor, axis: tensor.amax(axis)
    gl.sum = lambda tensor, axis: tensor.sum(axis)
    gl.cdiv = lambda one, other: -(-one // other)
    gl.arange = lambda first, last, layout: values(torch.arange(first, last))
    gl.full = lambda shape, value, kind, layout: values(torch.full(shape, float(value), dtype=kind.dtype))
    gl.zeros = lambda shape, kind, layout: values(torch.zeros(shape, dtype=kind.dtype))
    gl.zeros_like = lambda tensor: values(torch.zeros_like(tensor))
    gl.program_id = lambda axis: values(_here.place[axis])
    gl.num_programs = lambda axis: values((*_here.grid, 1, 1)[axis])
    gl.cast = lambda tensor, kind: values(tensor).to(kind)
    gl.fma = lambda one, other, more: one * other + more
    gl.permute = lambda tensor, order: tensor.permute(order)
    gl.join = lambda one, other: torch.stack((one, other), -1)
    gl.split = lambda tensor: (tensor[..., 0], tensor[..., 1])
    gl.convert_layout = lambda tensor, layout: tensor
    gl.constexpr, gl.static_range, gl.pointer_type = (lambda value: value), range, (lambda kind: kind)
    gl.load, gl.store, gl.allocate_shared_memory = load, store, allocate
    gl.inline_asm_elementwise, gl.warp_specialize = converted, specialize
    for name in ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout"):
        setattr(gl, name, lambda *_: None)
    gl.DistributedLinearLayout = linear_layout
    gl.SwizzledSharedLayout = lambda *_: None
    gl.NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *_: None)
    return gl


def _copy(target: Buffer, pointer: Pointer, mask: Any = None) -> None:
    """Begin a copy, which is done when its group is waited for."""
    _copies().append(lambda: target.store(load(pointer, mask)))


def _copies() -> list[Callable[[], None]]:
    """The copies of this group of warps that no group of copies has yet."""
    if not hasattr(_here, "copies"):
        _here.copies, _here.groups = [], []
    return _here.copies


def _commit() -> None:
    _here.groups.append(_copies())
    _here.copies = []


def _wait_group(outstanding: int) -> None:
    _copies()
    while len(_here.groups) > outstanding:
        for copy in _here.groups.pop(0):
            copy()


def _arrive_after_copies(barriers: Barriers, increment_count: bool) -> None:
    """Each thread of a group of four warps arrives, once all that it has begun to copy is there."""
    _commit()
    _wait_group(0)
    barriers.each[0].arrive(128)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of which blocks are copied."""

    memory: torch.Tensor
    block: list[int]


def matrix_of(descriptor: Any) -> Matrix:
    """The matrix that a descriptor of Triton's names; zeros are outside of it."""
    memory = descriptor.base.as_strided(descriptor.shape, descriptor.strides)
    return Matrix(memory, descriptor.block_shape)


def _copy_block(matrix: Matrix, place: list[Any], barriers: Barriers, target: Buffer) -> None:
    row, column = (int(each) for each in place)
    assert min(row, column) >= 0
    found = matrix.memory[row : row + matrix.block[0], column : column + matrix.block[1]]
    whole = torch.zeros(matrix.block, dtype=found.dtype)
    whole[: found.shape[0], : found.shape[1]] = found
    target.store(whole)
    barriers.each[0].copied(whole.nbytes)


def stand_ins() -> dict[str, ModuleType]:
    gluon: Any = ModuleType("gluon")
    gluon.jit = lambda function=None, **_: function or (lambda decorated: decorated)
    gluon.language = language()
    hopper: Any = ModuleType("hopper")
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = multiply, _waited
    hopper.warpgroup_mma_init = lambda value: value
    hopper.mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barrier",
        init=lambda barriers, count: setattr(barriers.each[0], "count", count),
        wait=lambda barriers, phase, pred=True: barriers.each[0].wait(phase) if pred else None,
        arrive=lambda barriers, count, pred=True: barriers.each[0].arrive(count) if pred else None,
        expect=lambda barriers, size: barriers.each[0].expect(size),
    )
    hopper.tma = SimpleNamespace(async_copy_global_to_shared=_copy_block)
    ampere: Any = ModuleType("ampere")
    ampere.async_copy = SimpleNamespace(
        async_copy_global_to_shared=_copy,
        commit_group=_commit,
        wait_group=_wait_group,
        mbarrier_arrive=_arrive_after_copies,
    )
    parent: Any = ModuleType("experimental")
    parent.gluon, root = gluon, "triton.experimental.gluon"
    scan: Any = ModuleType("scan")
    scan.LOG2E, scan.LN2, scan.tanh = kernels.LOG2E.value, kernels.LN2.value, torch.tanh
    found = {"triton.experimental": parent, root: gluon, f"{root}.language": gluon.language}
    found |= {kernels.__name__: scan}
    # Functions of Triton, which kernels in Gluon may call.
    triton: Any = ModuleType("triton")
    triton.jit, triton.language = gluon.jit, gluon.language
    found |= {"triton": triton, "triton.language": gluon.language}
    return found | {f"{root}.language.nvidia.hopper": hopper, f"{root}.language.nvidia.ampere": ampere}


def _waited(outstanding: int, deps: tuple[Any, ...]) -> Any:
    return deps[0] if len(deps) == 1 else deps


def argument(value: Any) -> Any:
    """An argument of a launch as the kernel has it."""
    if isinstance(value, torch.Tensor):
        return pointer_to(value)
    return matrix_of(value) if hasattr(value, "block_shape") else value


class Emulated:
    """A kernel that is launched as Triton's are."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            given = [argument(each) for each in arguments]
            _here.grid = grid
            for place in itertools.product(*(range(size) for size in grid)):
                _here.place = place
                self.fn(*given)

        return launch


@contextlib.contextmanager
def placed_at(place: tuple[int, ...], grid: tuple[int, ...]) -> Iterator[None]:
    """Inside, functions of the kernels are those of one program of a grid."""
    _here.place, _here.grid = place, grid
    yield


def placed(program: int, programs: int) -> AbstractContextManager[None]:
    """As `placed_at`, in a grid of one dimension."""
    return placed_at((program,), (programs,))


def emulated(*names: str) -> dict[str, Emulated]:
    """Kernels of attnplug's modules for Hopper, by their names: "latent_wide" has latent_wide_kernel."""
    before = "..ranges", "..split_places", "latent_bytes", "latent_loads", "prefill_loads", "prefill_weights"
    modules = loaded(KERNELS, (*before, "number_rows", "prefill_attend", *names), stand_ins())
    return {name: Emulated(getattr(modules[name], f"{name}_kernel")) for name in names}


def loaded(package: str, names: Sequence[str], given: dict[str, ModuleType]) -> dict[str, Any]:
    """Modules of a package of kernels, and "..others" beside it, made anew over stand-ins for Triton."""
    kept = {name: sys.modules.get(name) for name in given}
    folder = Path(__file__).parents[3] / package.replace(".", "/")
    modules: dict[str, Any] = {}
    try:
        for name in names:
            full = importlib.util.resolve_name(name, package) if name[0] == "." else f"{package}.{name}"
            kept.setdefault(full, sys.modules.get(full))
            file = folder.parent if name[0] == "." else folder
            spec = importlib.util.spec_from_file_location(full, file / f"{name.lstrip('.')}.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules.update(given)
            modules[name] = sys.modules[full] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(modules[name])
    finally:
        for name, module in kept.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
    return modules
