"""vLLM's engine on a CPU from its source tree alone: the scheduler, the block tables and the models are vLLM's own.

`prepare` comes before vLLM's first import. A few functions of its compiled part are torch here, layers run their plain
forms, and backends are checked as on NVIDIA's GPUs.
"""

from __future__ import annotations

import os
from typing import Any

import torch

QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

_SLOT_ARGUMENTS = "Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int block_size"


def prepare() -> None:
    """Make vLLM's LLM run in this process; once."""
    os.environ.update(QUIET)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    library = torch.library.Library("_C", "FRAGMENT")
    for signature, function in (
        ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
        (f"compute_slot_mapping_kernel_impl({_SLOT_ARGUMENTS}) -> ()", _slots),
        ("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1)),
        # It is looked up, and not called.
        ("gelu_tanh_and_mul(Tensor(a!) out, Tensor x) -> ()", lambda out, x: None),
    ):
        library.define(signature)
        library.impl(signature.split("(")[0], function, "CompositeExplicitAutograd")
    _KEPT.append(library)

    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability

    class Platform(CpuPlatform):  # type: ignore[misc]
        """The CPU, with the choice of attention that vLLM has on NVIDIA's GPUs."""

        @classmethod
        def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, **rest: Any) -> str:
            asked = {"device_capability": DeviceCapability(9, 0), **attn_selector_config._asdict()}
            reasons = selected_backend.get_class().validate_configuration(**asked)
            if reasons:
                raise ValueError(f"Selected backend {selected_backend} is not valid. Reason: {reasons}")
            return str(selected_backend.get_path())

        @classmethod
        def update_block_size_for_backend(cls, vllm_config: Any) -> None:
            # The CPU's own has 128 whatever a backend prefers.
            super(CpuPlatform, cls).update_block_size_for_backend(vllm_config)

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    vllm.platforms._current_platform = Platform()
    import vllm.model_executor.layers.utils
    import vllm.utils.torch_utils
    from vllm.model_executor.custom_op import CustomOp

    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *given: False

    vllm.utils.torch_utils.PIN_MEMORY = False
    CustomOp.dispatch_forward = lambda self, *given, **named: self.forward_native


def prepare_latents() -> None:
    """Make layers of latent attention without vLLM's prefill backends, which attnplug's layers never call."""
    from vllm.model_executor.layers.attention import mla_attention

    class NoPrefill:
        def __init__(self, **given: object) -> None:
            pass

    mla_attention.get_mla_prefill_backend = lambda config: NoPrefill


def prepare_ranks() -> None:
    """Give the tokens of ranks that share them their slots, which vLLM does on GPUs alone."""
    from vllm.v1.worker.block_table import BlockTable

    def compute(self: Any, num_reqs: int, starts: torch.Tensor, positions: torch.Tensor) -> None:
        size, run, block = self.dcp_world_size, self.cp_kv_cache_interleave_size, self.block_size
        # A block of the table has the tokens of a block on each rank, in runs one rank after another.
        starts = starts[: num_reqs + 1]
        owners = positions // run % size
        local = positions // (size * run) * run + positions % run
        _slots(starts, local, self.block_table.gpu, self.slot_mapping.gpu, block)
        self.slot_mapping.gpu[: len(positions)].masked_fill_(owners != self.dcp_rank, -1)

    BlockTable.compute_slot_mapping = compute


_KEPT: list[Any] = []


def _slots(
    starts: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, block_size: int
) -> None:
    slots.fill_(-1)
    counts = starts.diff().long().clamp(min=0)
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)[: len(positions)]
    at = positions[: len(rows)].long()
    slots[: len(rows)] = table[rows, at // block_size].long() * block_size + at % block_size
