"""A layer of an engine that gives its layers one by one: its backend for each phase, and its part of a step."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.default import get_registry
from attnplug.registry.devices import resolve_device
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.plan.plan_choice import check_served, phase_choices, phase_notes


def by_phase(spec: LayerSpec, name: str, shown: str) -> Decision:
    """The backend for the layer, or two that share its pages: the first prefills, and the second decodes.

    Args:
        spec: the layer.
        name: matched by rules for layer names; "" if the engine does not pass it.
        shown: the layer in errors.

    Raises:
        NoBackendError, BackendUnavailableError: with each candidate's reasons.
    """
    # `attnplug.plan` needs all layers of a model at once, and refuses rules for kinds that none of them has.
    registry, device = get_registry(), resolve_device(None)
    both, *alone = (registry.decide(spec, device, phase, layer_name=name) for phase in (None, *Phase))
    phases = dict(zip(Phase, alone, strict=True))
    found = phase_choices(registry, {name: both}, {name: phases}, {}, per_phase=True)
    decision = found.decisions[name]
    check_served(registry, {shown: decision})
    return dataclasses.replace(decision, notes=(*decision.notes, *phase_notes(found.decisions, found)))


def with_direct_keys(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The step for an encoder's layers: the keys of the call are those of the queries, and no slot is written."""
    reqs = common.num_reqs
    lens = np.diff(common.query_start_loc_cpu[: reqs + 1].numpy()).astype(np.int32)
    return dataclasses.replace(
        common,
        causal=False,
        seq_lens=common.query_start_loc[: reqs + 1].diff(),
        max_seq_len=common.max_query_len,
        block_table_tensor=common.block_table_tensor[:, :0],
        slot_mapping=torch.full_like(common.slot_mapping, PAD_SLOT_ID),
        key_start_loc=common.query_start_loc,
        key_start_loc_cpu=common.query_start_loc_cpu,
        seq_lens_host=lens,
        seq_lens_host_exact=True,
    )
