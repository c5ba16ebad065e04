"""Compiles the kernels for latents on Hopper, in a process where Triton is not interpreted; prints JSON.

python hopper_forms.py '[["latents", 16, 512, 64, "*bf16", "*bf16"], ["prefill", 128, 64, 3, 3, false]]'
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type

from attnplug.backends.triton.kernels.hopper.latent_narrow import latent_narrow_kernel
from attnplug.backends.triton.kernels.hopper.latent_wide import latent_wide_kernel
from attnplug.backends.triton.kernels.hopper.specialized_prefill import specialized_prefill_kernel
from attnplug.backends.triton.latent import hopper_launch
from attnplug.backends.triton.launch import tile_parts, tile_side
from attnplug.backends.triton.specialized import CallTiles

POINTERS = {"query_start_loc": "*i32", "seq_lens": "*i32", "block_table": "*i32", "tiles": "*i32"}
POINTERS |= {"key_start_loc": "*i32", "lse": "*fp32", "partials": "*fp32", "partial_lses": "*fp32"}
UNALIGNED = {"query_start_loc", "seq_lens", "block_table", "key_start_loc", "lse", "mm_spans"}
UNALIGNED |= {"powers"}


def latents(rows: int, rank: int, rope: int, queries: str, stored: str) -> dict[str, Any]:
    """The kernel over latents for `rows` rows."""
    kernel: Any = latent_wide_kernel if rows == 64 else latent_narrow_kernel
    launch = hopper_launch(rows, 1 if "fp8" in stored else 2, [rows])
    constants = {"stride_token": rank + rope, "HEADS": 16, "BLOCK_SIZE": 64, "BLOCK_M": rows}
    constants |= {"BLOCK_N": launch.block_n, "LATENT": rank, "ROPE": rope, "STAGES": launch.num_stages}
    constants |= {"HAS_LSE": True, "PDL": "fp8" not in stored}
    types = {**POINTERS, **dict.fromkeys(("q_nope", "q_pe", "output"), queries), "cache": stored}
    limit = {} if launch.max_registers is None else {"maxnreg": launch.max_registers}
    return facts(kernel, types, constants, {"stride_block"}, **limit)


def prefill(
    size: int,
    block_n: int,
    num_stages: int,
    groups: int,
    window: bool,
    numbers: int = 0,
    call: bool = False,
    in_turn: bool = False,
    held: bool = False,
) -> dict[str, Any]:
    """The prefill kernel with specialised warps for heads of `size` elements, over pages or keys of the `call`."""
    switches = ("HAS_RIGHT", "PAGED", "HAS_LSE")
    constants = dict.fromkeys(switches, True) | {"HAS_LEFT": window, "HAS_CHUNK": False, "HAS_SINKS": window}
    constants |= {"HAS_CAP": False}
    constants |= {"KV_HEADS": 8, "BLOCK_SIZE": 16, "GROUP": 4, "BLOCK_M": 64 * groups, "BLOCK_N": block_n}
    constants |= {
        "D": size,
        "STAGES": num_stages,
        "FIXED": False,
        "EVEN": False,
        "NUMBERS": numbers,
        "IN_TURN": in_turn,
        "HELD": held,
        "PDL": True,
    }
    parts = (tile_side(size), 0) if numbers == 2 else tile_parts(size)
    constants |= dict(zip(("BLOCK_D", "TAIL"), parts, strict=True)) | {"PAGED": not call}
    tensors = ("query", "k_cache", "v_cache", "output", "sinks", "alibi_slopes", "mm_spans", "matrix")
    types = {**POINTERS, **dict.fromkeys(tensors, "*bf16"), "powers": "*fp32"}
    constants |= dict.fromkeys(CallTiles.NAMES)
    if call:
        k = torch.empty(8, 8, size, dtype=torch.bfloat16)
        made = zip(CallTiles.NAMES, CallTiles(block_n, parts, k)((k, k, k)), strict=True)
        types |= {name: mangle_type(tile) for name, tile in made if tile is not None}
    if numbers:
        types |= dict.fromkeys(("k_cache", "v_cache"), "*fp16")
    sides = itertools.product("kv", "bth")
    strides = {f"stride_{tensor}{side}" for tensor, side in sides} | {"stride_qt", "stride_qh"}
    return facts(specialized_prefill_kernel, types, constants, strides | {"stride_ot", "stride_oh"})


def facts(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], even: set[str], **options: int
) -> dict[str, Any]:
    """What a kernel is on sm_90, where integers `even` are multiples of 16."""
    signature: dict[str, str] = {}
    values, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        signature[name] = types.get(name, "fp32" if name in ("scale", "value_scale", "cap") else "i32")
        if parameter.is_constexpr or (constants.get(name, 0) is None and name not in types):
            signature[name], values[(index,)] = "constexpr", constants[name]
        elif (signature[name][0] == "*" and name not in UNALIGNED) or name in even:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    binary: Any = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options}
    )
    text = binary.asm["ptx"]
    said = assembled(text)
    return {
        "shared": binary.metadata.shared,
        "registers by group": "setmaxnreg" in text,
        "products": sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k\d+)", text))),
        "copies": "cp.async.cg.shared.global" in text,
        "block copies": "cp.async.bulk.tensor" in text,
        "narrow copies": "cp.async.ca.shared.global" in text,
        "conversions": sorted(set(re.findall(r"cvt\.rn\.f16x2\.(e\dm\d)x2", text))),
        "serialized": "wgmma.mma_async instructions are serialized" in said,
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
    }


def assembled(text: str) -> str:
    """What the assembler says of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(text)
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file, "-o", file.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


if __name__ == "__main__":
    kinds = {"latents": latents, "prefill": prefill}
    print(json.dumps([kinds[kind](*form) for kind, *form in json.loads(sys.argv[1])]))
