"""An object that holds views of its own buffers, or counts what others hold, is not copied; values are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnplug
from attnplug._system.one_commit import NotCopied
from attnplug.backends.flashinfer.planned_wrapper import PlanSpace
from attnplug.backends.triton.workspace import Workspace
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.errors import BatchError
from attnplug.mla.selected import SelectedSteps
from attnplug.ops.buffers import StagingRing
from attnplug.runtime import AttentionRuntime, BlockPool, CpuGpuBuffer, GraphState, StepBatchBuilder
from attnplug.runtime.batch.staging import PackedBuffer, StepFields

SPEC = LayerSpec(num_heads=1, num_kv_heads=1, head_size=16, dtype="float32")
CPU = torch.device("cpu")
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy in a list": lambda made: copy.deepcopy([made])[0],
    **{
        f"pickle {protocol}": lambda made, protocol=protocol: pickle.dumps(made, protocol)
        for protocol in (0, 2, 5)
    },
}


def runtime() -> AttentionRuntime:
    plan = attnplug.plan({"a": SPEC}, "cpu", backend="TORCH", num_blocks=8)
    return AttentionRuntime(
        plan, config=BuilderConfig(max_num_seqs=2, max_model_len=32, cudagraph_batch_sizes=(2,))
    )


def builder() -> StepBatchBuilder:
    return runtime().step_batch_builder()


def buffer() -> CpuGpuBuffer:
    return CpuGpuBuffer(4, dtype=torch.int32, device="cpu")


MADE: dict[str, Callable[[], Any]] = {
    "StepBatchBuilder": builder,
    "BlockPool": lambda: BlockPool(4),
    "AttentionRuntime": runtime,
    "GraphState": lambda: GraphState(runtime()),
    "GraphInputBuffers": lambda: GraphState(runtime()).get_graph_input_buffers(2),
    "TorchMetadataBuilder": lambda: runtime().attention_groups[0].builder,
    "CpuGpuBuffer": buffer,
    "StagingRing": lambda: StagingRing([buffer(), buffer()], "cpu"),
    "PackedBuffer": lambda: PackedBuffer(2, 4, dtype=torch.int64, device=CPU),
    "StepFields": lambda: StepFields(2, 1, 4, CPU),
    "SlotMappings": lambda: builder()._buffers._slots,
    "Workspace": lambda: Workspace(2, CPU),
    "SelectedSteps": lambda: SelectedSteps(2, CPU),
    "PlanSpace": lambda: PlanSpace(CPU, 2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MADE)
def test_what_holds_views_of_its_own_buffers_refuses_a_copy_with_a_sentence(name, way):
    made = MADE[name]()
    with pytest.raises(BatchError, match=f"object='{name}' cannot be copied or pickled.*make another one"):
        WAYS[way](made)


def test_every_builder_of_metadata_is_such_an_object():
    assert issubclass(attnplug.core.AttentionMetadataBuilder, NotCopied)


def test_a_refused_copy_leaves_the_builder_as_it_was():
    made = builder()
    made.add_request("r", [[1]])
    with pytest.raises(BatchError):
        copy.deepcopy(made)
    assert made.step(4).common.seq_lens.tolist() == [4]


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copied_batch_has_the_same_numbers(way):
    attention = runtime()
    made = attention.step_batch_builder()
    made.add_request("r", [[3]])
    batch = made.step(4)
    copied = way(batch)
    assert copied.common.seq_lens.tolist() == [4]
    assert copied.common.slot_mapping.tolist() == [48, 49, 50, 51]
    attention.begin_step(copied)
    values = torch.arange(4.0)[:, None, None].expand(4, 1, 16).contiguous()
    output = attention.forward("a", torch.zeros_like(values), torch.zeros_like(values), values)
    assert output[:, 0, 0].tolist() == [0, 0.5, 1, 1.5]
