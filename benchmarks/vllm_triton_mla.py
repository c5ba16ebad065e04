"""vLLM's Triton kernel for decodes over latents, from its source file alone: vLLM need not be installed.

The file is `vllm/v1/attention/ops/triton_decode_attention.py` of vLLM's sdist. `VLLM_SOURCE` names the unpacked sdist,
or any folder with that path in it. The file takes the platform and Triton from vLLM, and stand-ins give it both.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from mla_latents import DIMS, Call, Latents

__all__ = ["vllm_triton"]

_FILE = "vllm/v1/attention/ops/triton_decode_attention.py"
# As vLLM 0.33 divides a request, in `TritonMLAImpl` of vllm/v1/attention/backends/mla/triton_mla.py.
_KEYS_OF_SPLIT = 512
_SPLITS_OF_SM = 2


def vllm_triton(latents: Latents) -> Call:
    """A call of the kernel on packed queries, with its scratch and each query's length and pages made before."""
    kernel = _module().decode_attention_fwd
    cell, rank = latents.cell, DIMS.kv_lora_rank
    lens, table, query = latents.common.seq_lens, latents.table, latents.query
    if cell.queries > 1:
        # It has no causal mask: every query is a request of its own, and reads the latents anew.
        ends = torch.arange(1 - cell.queries, 1, device=latents.device, dtype=torch.int32)
        lens, table = (lens[:, None] + ends).flatten(), table.repeat_interleave(cell.queries, dim=0)
    splits = 1 << (max(cell.length // _KEYS_OF_SPLIT, 1) - 1).bit_length()
    if latents.device.type == "cuda":
        count = torch.cuda.get_device_properties(latents.device).multi_processor_count
        splits = min(splits, _SPLITS_OF_SM * count)
    tokens = query.shape[0]
    scratch = torch.empty(tokens, cell.heads, splits, rank + 1, device=latents.device)
    output = torch.empty_like(latents.q_nope)
    lse = torch.empty(tokens, cell.heads, dtype=query.dtype, device=latents.device)
    one = torch.ones((), device=latents.device)

    def run(index: int) -> torch.Tensor:
        pages = latents.cache(index)[:, :, None]
        sizes = splits, latents.scale, cell.page
        given = query, pages, pages[..., :rank], output, lse, table, lens, scratch
        kernel(*given, *sizes, k_scale=one, v_scale=one, is_mla=True)
        return output

    return run


def _module() -> Any:
    """The loaded file; FileNotFoundError, with a remedy, if there is none."""
    path = Path(os.environ.get("VLLM_SOURCE", "")) / _FILE
    if not os.environ.get("VLLM_SOURCE") or not path.is_file():
        raise FileNotFoundError(f"no {_FILE}: name vLLM's unpacked sdist in VLLM_SOURCE")
    import triton

    platform = types.SimpleNamespace(is_rocm=lambda: torch.version.hip is not None)
    stand_ins: dict[str, Any] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
    }
    before = {name: sys.modules.get(name) for name in stand_ins}
    for name, values in stand_ins.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    try:
        found = importlib.util.spec_from_file_location("vllm_triton_decode_attention", path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    finally:
        for name, previous in before.items():
            del sys.modules[name]
            if previous is not None:
                sys.modules[name] = previous
    return module
