"""Records and compiles kernels for GPUs that are not here, in a process where Triton is not interpreted; prints JSON.

python ahead_kernels.py planted sm86
python ahead_kernels.py launched sm86 'plain/mixed/d128/bfloat16/auto/b16/NHD' ...
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import resource
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

import attnplug
from attnplug.backends.triton.ahead.chips import CHIPS
from attnplug.backends.triton.ahead.compiling import compile_all, is_cached, target_of
from attnplug.backends.triton.ahead.forms import Form
from attnplug.backends.triton.ahead.pretended import pretended
from attnplug.backends.triton.layout import tile_memory
from attnplug.core import BuilderConfig, LayerSpec, Phase
from attnplug.matrix.axes import phase_of, spec_of
from attnplug.matrix.compiled import launches
from attnplug.matrix.design import declare
from attnplug.matrix.model import Cell, Status
from attnplug.registry.default import get_registry
from attnplug.runtime import AttentionRuntime
from attnplug.runtime.steps.dummy_steps import DummyShape
from attnplug.runtime.steps.warm_up import distinct_layers, run_step


@triton.jit
def product_kernel(x, y, LONG: tl.constexpr):
    """Multiplies two matrices of 32 rows and columns, both of which are in shared memory."""
    rows, long = tl.arange(0, 32), tl.arange(0, LONG)
    left = tl.load(x + rows[:, None] * LONG + long[None, :])
    right = tl.load(x + long[:, None] * 32 + rows[None, :])
    tl.store(y + rows[:, None] * 32 + rows[None, :], tl.dot(left, right).to(tl.bfloat16))


def planted(arch: str) -> list[dict[str, Any]]:
    """The kernel as it fits, with too few registers, which only NVIDIA's compiler limits, and with 128 KB of tiles."""
    chip = CHIPS[arch]
    with pretended(chip) as found:
        x = torch.zeros(1 << 16, dtype=torch.bfloat16, device="cuda")
        assert x.is_cuda
        assert x.cpu().device.type == "cpu"
        few = {"num_warps": 1, "maxnreg": 40} if chip.is_nvidia else {}
        for long, options in ((32, {}), (256, few), (1024 if chip.is_nvidia else 2048, {})):
            for _ in range(2):
                product_kernel[(1,)](x, x, LONG=long, **options)
    assert not torch.zeros(1).is_cuda
    return [dataclasses.asdict(each) for each in compile_all([(form, chip) for form in found], 2)]


def found_by_a_launch(arch: str) -> dict[str, list[bool]]:
    """Whether Triton's own launch finds in its cache a kernel that was compiled ahead, and another one."""
    chip = CHIPS[arch]
    with pretended(chip) as found:
        x = torch.zeros(1 << 16, dtype=torch.bfloat16, device="cuda")
        product_kernel[(1,)](x, x, LONG=32)
    (form,) = found
    before, names = is_cached(form, chip), dict(vars(nvidia))
    (made,) = compile_all([(form, chip)], 1, again=False)
    assert not made.refused
    assert {name for name, value in vars(nvidia).items() if names[name] is not value} == set()
    hits: list[bool] = []
    knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
    stand_in = {"get_current_device": 0, "get_current_stream": 0, "get_current_target": target_of(chip)}
    driver.set_active(SimpleNamespace(**{name: lambda *_, it=it: it for name, it in stand_in.items()}))
    x = torch.zeros(1 << 16, dtype=torch.bfloat16)
    for long in (32, 64):
        product_kernel.warmup(x, x, LONG=long, grid=(1,))
    return {"cached": [before, is_cached(form, chip)], "hits": hits}


def forms_of(arch: str, ids: Sequence[str]) -> dict[str, dict[Form, None]]:
    """The forms of kernels that each claimed cell launches."""
    (offer,) = (offer for offer in get_registry().plugins.offers if offer.name == "TRITON")
    chip = CHIPS[arch]
    claimed = {
        each.cell.id: each.cell
        for each in declare(offer, chip.device).findings
        if each.status is Status.DECLARED
    }
    found = {}
    for each in ids:
        cell: Cell | None = claimed.get(each)
        if cell is not None:
            found[each] = launches(spec_of(cell), phase_of(cell), chip.device, cell.layout)
    return found


def launched(arch: str, *ids: str) -> dict[str, list[str]]:
    """The kernels that each claimed cell launches: "prefill.prefill_kernel"."""
    return {
        each: sorted({f"{form.function.module.rpartition('.')[2]}.{form.name}" for form in forms})
        for each, forms in forms_of(arch, ids).items()
    }


def paged(arch: str, *ids: str) -> dict[str, list[bool]]:
    """Whether the forms of prefill that each claimed cell launches read pages."""
    return {
        each: sorted({form.constants.get("PAGED", False) for form in forms if "prefill" in form.name})
        for each, forms in forms_of(arch, ids).items()
    }


def memory(arch: str) -> dict[str, float]:
    """The sums of page numbers, and how many MiB more a process has that makes 1 GiB of states and copies them."""
    with pretended(CHIPS[arch]):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        states = torch.zeros(256, 1 << 20, dtype=torch.float32, device="cuda")
        states.copy_(states.t().contiguous().t())
        states.view(torch.complex128)[:, ::2].copy_(states.view(torch.complex128)[:, 1::2])
        states[:, ::2] = states[:, 1::2]
        torch.zeros(256, 1 << 20, dtype=torch.float32).to("cuda")
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pages = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
        pages[:2] = 3
        pages[2:4].copy_(pages[:2])
        turned = torch.arange(6.0).view(2, 3).t().contiguous()
        host = float((turned * torch.arange(6.0).view(3, 2)).sum())
        return {"pages": float(pages.cpu().sum()), "more": (after - before) / 1024, "host": host}


def after_warm_up(arch: str, name: str, context: str) -> list[str]:
    """The kernels that an engine of one request launches first in a prompt after so many tokens of a layer's cache."""
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, block_size=16, kv_cache_dtype=name)
    plan = attnplug.plan({"layer": spec}, CHIPS[arch].device, backend="TRITON", num_blocks=4)
    limits = BuilderConfig(max_num_seqs=1, max_num_batched_tokens=2048)
    with pretended(CHIPS[arch]) as found:
        runtime = AttentionRuntime(plan, config=limits)
        runtime.warm_up()
        known = set(found)
        shape = DummyShape(1, 2048, int(context), Phase.PREFILL)
        for layer, backend, _ in distinct_layers(runtime):
            run_step(runtime, layer, backend, shape)
        return [str(form) for form in found if form not in known]


def after_prompts(arch: str, tokens: str, *limits: str) -> list[str]:
    """What new prompts and extends launch first after a warm-up, of layers with a window or chunk: "sliding_window=700"."""
    layers = {}
    for number, (name, _, value) in enumerate(each.partition("=") for each in limits):
        sizes: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16}
        layers[str(number)] = LayerSpec(**sizes | {name: int(value)})
    plan = attnplug.plan(layers, CHIPS[arch].device, backend="TRITON", num_blocks=4)
    backends = {name: plan.decisions[name].get_backend_cls() for name in layers}
    most = int(tokens)
    with pretended(CHIPS[arch]) as found:
        runtime = AttentionRuntime(
            plan, config=BuilderConfig(max_num_seqs=8, max_num_batched_tokens=most, max_model_len=most)
        )
        runtime.warm_up()
        known = set(found)
        for new, context in itertools.product((300, 600, 1024, 1300, 1800, 3000, 4096, 5000), (0, 500)):
            for name in layers if new + context <= most else ():
                shape = DummyShape(1, new, context, Phase.PREFILL)
                run_step(runtime, runtime.layers[name], backends[name], shape)
        return [str(form) for form in found if form not in known]


def tiles(arch: str, *layers: str) -> dict[str, list[int]]:
    """Of each layer, "int8_token_head/160", the bytes that the tiles of its prefills of long prompts and of extends take."""
    found: dict[str, list[int]] = {}
    for each in layers:
        name, size = each.split("/")
        spec = LayerSpec(
            num_heads=32, num_kv_heads=8, head_size=int(size), block_size=16, kv_cache_dtype=name
        )
        if attnplug.explain(spec, CHIPS[arch].device, backend="TRITON").chosen is None:
            continue
        plan = attnplug.plan({"layer": spec}, CHIPS[arch].device, backend="TRITON", num_blocks=300)
        with pretended(CHIPS[arch]) as launched:
            runtime = AttentionRuntime(
                plan, config=BuilderConfig(max_num_seqs=4, max_num_batched_tokens=4096)
            )
            for layer, backend, _ in distinct_layers(runtime):
                for new, context in ((2000, 0), (700, 3000), (30, 500)):
                    run_step(runtime, layer, backend, DummyShape(1, new, context, Phase.PREFILL))
        # Tiles that are opened in registers take other room than they are long.
        prefills = [form for form in launched if form.name == "prefill_kernel" and _is_loaded(form)]
        found[each] = [_tile_bytes(form) for form in prefills]
    return found


def _is_loaded(form: Form) -> bool:
    return form.constants.get("FORMAT") is None or form.constants["FORMAT"][0] == "opened"


def _tile_bytes(form: Form) -> int:
    constants = form.constants
    width, width_v = (2 * sum(constants.get(name) or 0 for name in pair) for pair in _PARTS)
    return tile_memory(constants["BLOCK_M"], constants["BLOCK_N"], form.options.num_stages, width, width_v)


_PARTS = ("BLOCK_D", "TAIL"), ("BLOCK_DV", "TAIL_V")


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    kinds = {"planted": planted, "found": found_by_a_launch, "launched": launched, "paged": paged}
    kinds |= {"memory": memory, "after": after_warm_up, "prompts": after_prompts, "tiles": tiles}
    print(json.dumps(kinds[kind](*rest)))
