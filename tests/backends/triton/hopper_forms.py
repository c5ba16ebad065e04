"""Compiles the kernels for latents on Hopper, in a process where Triton is not interpreted; prints JSON.

python hopper_forms.py '[[16, 512, 64, "*bf16", "*bf16"]]'
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from attnplug.backends.triton.kernels.hopper.latent_narrow import latent_narrow_kernel
from attnplug.backends.triton.kernels.hopper.latent_wide import latent_wide_kernel
from attnplug.backends.triton.latent_launch import hopper_launch

POINTERS = {"query_start_loc": "*i32", "seq_lens": "*i32", "block_table": "*i32", "tiles": "*i32"}
POINTERS |= {"lse": "*fp32", "partials": "*fp32", "partial_lses": "*fp32"}
UNALIGNED = {"query_start_loc", "seq_lens", "block_table", "lse"}


def facts(rows: int, rank: int, rope: int, queries: str, latents: str) -> dict[str, Any]:
    """What the kernel for `rows` rows is on sm_90."""
    kernel: Any = latent_wide_kernel if rows == 64 else latent_narrow_kernel
    launch = hopper_launch(rows, 1 if "fp8" in latents else 2)
    constants = {"stride_token": rank + rope, "HEADS": 16, "BLOCK_SIZE": 64, "BLOCK_M": rows}
    constants |= {"BLOCK_N": launch.block_n, "LATENT": rank, "ROPE": rope, "STAGES": launch.num_stages}
    constants |= {"HAS_LSE": True}
    types = {**POINTERS, **dict.fromkeys(("q_nope", "q_pe", "output"), queries), "cache": latents}
    signature: dict[str, str] = {}
    values, attributes = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        signature[name] = types.get(name, "fp32" if name == "scale" else "i32")
        if parameter.is_constexpr:
            signature[name], values[(index,)] = "constexpr", constants[name]
        elif (name in types and name not in UNALIGNED) or name == "stride_block":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": launch.num_warps}
    binary: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = binary.asm["ptx"]
    return {
        "shared": binary.metadata.shared,
        "registers by group": "setmaxnreg" in text,
        "products": sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16)", text))),
        "copies": "cp.async.cg.shared.global" in text,
        "conversions": sorted(set(re.findall(r"cvt\.rn\.f16x2\.(e\dm\d)x2", text))),
    }


if __name__ == "__main__":
    print(json.dumps([facts(*form) for form in json.loads(sys.argv[1])]))
