"""Runs pieces of PTX on tensors: each register is an integer for every element that the assembly is given.

It knows the instructions of kernels/registers/openings.py, so their constants and selections are checked as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

_WORD = 0xFFFFFFFF
_WIDTHS = {"b16": 16, "u16": 16, "f16": 16}
Number = Any
"""Bits of a register: int64 of any shape, or an integer."""


def run(text: str, constraints: str, given: list[torch.Tensor], dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    """The outputs of a piece of assembly, as tensors of `dtypes`."""
    names = constraints.split(",")
    registers: dict[str, Number] = {}
    for at, tensor in enumerate(given, len(dtypes)):
        assert names[at] == ("h" if tensor.itemsize == 2 else "r"), "a register of the operand's width"
        registers[f"${at}"] = _bits(tensor)
    for line in re.sub(r"^\{|\}$", "", text.strip()).split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            name, operands = line.strip().split(None, 1)
            target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", operands)
            _write(registers, target, _RUN[name](*(_read(registers, each) for each in sources)))
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    found = (torch.as_tensor(registers[f"${at}"]).expand(shape) for at in range(len(dtypes)))
    return [_as(bits, dtype) for bits, dtype in zip(found, dtypes, strict=True)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.contiguous().view(kind).long() & ((1 << 8 * tensor.itemsize) - 1)


def _as(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    width = 8 * dtype.itemsize
    bits = bits & ((1 << width) - 1)
    return (bits - ((bits >> (width - 1)) << width)).to(kind).view(dtype)


def _read(registers: dict[str, Number], operand: str) -> Number:
    if operand[0] == "{":
        low, high = (_read(registers, each.strip()) for each in operand[1:-1].split(","))
        return low | high << 16
    return registers[operand] if operand in registers else int(operand, 0)


def _write(registers: dict[str, Number], target: str, value: Number) -> None:
    if target[0] == "{":
        low, high = (each.strip() for each in target[1:-1].split(","))
        registers[low], registers[high] = value & 0xFFFF, value >> 16
    else:
        registers[target] = value


def _selected(a: Number, b: Number, selection: int) -> Number:
    result: Number = 0
    for at in range(4):
        place = selection >> 4 * at & 15
        assert place < 8, "no sign is repeated"
        result = result | ((a if place < 4 else b) >> 8 * (place & 3) & 255) << 8 * at
    return result


def _chosen(a: Number, b: Number, c: Number, table: int) -> Number:
    result: Number = 0
    for place in range(8):
        if table >> place & 1:
            bits = (
                each if place >> at & 1 else each ^ _WORD
                for each, at in zip((a, b, c), (2, 1, 0), strict=True)
            )
            first, second, third = bits
            result = result | first & second & third
    return result


def _halves(function: Callable[..., torch.Tensor]) -> Callable[..., Number]:
    """Arithmetic of two halves, rounded once: products of halves and their sums are exact in float64."""

    def pairs(*operands: Number) -> Number:
        found = []
        for shift in (0, 16):
            parts = (torch.as_tensor(each) >> shift & 0xFFFF for each in operands)
            found.append(_bits(function(*(_as(each, torch.float16).double() for each in parts)).half()))
        return found[0] | found[1] << 16

    return pairs


def _widened(pair: Number) -> Number:
    parts = (torch.as_tensor(pair >> shift & 255).to(torch.uint8) for shift in (0, 8))
    low, high = (_bits(each.view(torch.float8_e4m3fn).half()) for each in parts)
    return low | high << 16


def _logarithm(bits: Number) -> Number:
    return _bits(torch.log2(_as(bits, torch.float32)))


_RUN: dict[str, Callable[..., Number]] = {
    "mov.b32": lambda a: a,
    "mov.b16": lambda a: a,
    "cvt.u16.u32": lambda a: a & 0xFFFF,
    "shl.b32": lambda a, count: a << count & _WORD,
    "shr.b32": lambda a, count: a >> count,
    "shr.u32": lambda a, count: a >> count,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b & _WORD,
    "mad.lo.u32": lambda a, b, c: a * b + c & _WORD,
    "lop3.b32": _chosen,
    "prmt.b32": _selected,
    "mul.rn.f16x2": _halves(lambda a, b: a * b),
    "sub.f16x2": _halves(lambda a, b: a - b),
    "fma.rn.f16x2": _halves(lambda a, b, c: a * b + c),
    "cvt.rn.f16x2.e4m3x2": _widened,
    "lg2.approx.ftz.f32": _logarithm,
}
