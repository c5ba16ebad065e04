"""Runs the decode loop in registers on a CPU, over the stand-ins of gluon_emulation.py and ptx_emulation.py."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import ptx_emulation
import torch
from gluon_emulation import Emulated, Pointer, Type, argument, loaded, placed_at, stand_ins, values

PACKAGE = "attnplug.backends.triton.kernels.registers"
_MODULES = ("..formats", "..ranges", "..shares", "openings", "operands", "tiles", "loop", "decode")


def assembled(
    text: str, constraints: str, given: list[torch.Tensor], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """What a piece of assembly gives for each element; exchanges across a warp are those of its last two dimensions."""
    if text.startswith("movmatrix"):
        assert pack == 2
        return given[0].transpose(-1, -2)
    if text.startswith("membar"):
        return given[0]
    assert pack == 1
    several = isinstance(dtype, tuple)
    dtypes = tuple(each.dtype for each in (dtype if several else (dtype,)))
    # Numbers of the whole program are 32-bit registers.
    plain = [(each if each.dim() else each.int()).as_subclass(torch.Tensor) for each in given]
    found = tuple(values(each) for each in ptx_emulation.run(text, constraints, plain, dtypes))
    return found if several else found[0]


def multiply(left: Any, right: Any, acc: Any) -> Any:
    assert left.dtype == right.dtype == torch.float16
    return values(left.float() @ right.float()) + acc


class RegisterDecode(Emulated):
    """The kernel. Scales that are numbers come as those of heads."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        names = self.fn.__code__.co_varnames

        def launch(*arguments: Any, **options: Any) -> None:
            given = [
                Pointer(torch.full((grid[0],), each))
                if name in ("scale", "value_scale") and isinstance(each, float)
                else argument(each)
                for name, each in zip(names, arguments, strict=False)
            ]
            for place in itertools.product(*(range(size) for size in grid)):
                with placed_at(place, grid):
                    self.fn(*given)

        return launch


def register_decode() -> RegisterDecode:
    """The kernel as it is written, without Triton."""
    modules = stand_ins()
    gl: Any = modules["triton.experimental.gluon.language"]
    gl.inline_asm_elementwise = assembled
    gl.AutoLayout, gl.set_auto_layout = (lambda: None), (lambda tensor, layout: tensor)
    # Without a layout, a row has one scale.
    gl.BlockedLayout = lambda *_: "blocks"
    for name, dtype in (("uint8", torch.uint8), ("uint16", torch.uint16)):
        setattr(gl, name, Type(dtype))
    modules["triton.experimental.gluon.language.nvidia.ampere"].mma_v2 = multiply
    modules["attnplug.backends.triton.kernels.scan"].add_parts = None
    cuda: Any = ModuleType("cuda")
    cuda.gdc_launch_dependents = cuda.gdc_wait = lambda: None
    modules["triton.language.extra.cuda"] = cuda
    return RegisterDecode(loaded(PACKAGE, _MODULES, modules)["decode"].register_decode_kernel)
