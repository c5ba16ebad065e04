"""Backends that keep a little of each step or layer: variants of TORCH, each with one place that grows."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.latent import TorchMLABuilder
from mutants.parts import Altered, Around
from mutants.table import Table

table = Table("leaks")
_STEPS, _LAYERS = "state/memory-steps", "state/memory-layers"
call = table.on(Around)
step = table.on(Altered)

_SEEN: list[Any] = []
_BY_NUMBER: dict[int, Any] = {}
_LOG = bytearray()


@call.before(_STEPS, "bytes of C code")
def keeps_32_bytes(self, call):
    """Writes a record of 32 bytes for each step."""
    _LOG.extend(bytes(32))


@step.altered(_STEPS, "entries of containers", state={"flags": None})
def keeps_flags(self, made, common):
    """Keeps a flag of each step, for which Python has no object of its own."""
    self.flags = [] if self.flags is None else self.flags
    self.flags.append(True)
    return made


@call.before(_STEPS, "Python objects")
def keeps_times(self, call):
    """Keeps a number of each step in a list of the module."""
    _SEEN.append(float(call.query.shape[0]) / 3)


@call.before(_STEPS, "sparse token_topk")
def keeps_selections(self, call):
    """Keeps the numbers of selected keys, for sparse layers only."""
    if self.spec.sparse is not None:
        _SEEN.append([call.metadata.num_actual_tokens])


@call.before(_STEPS, "of cross")
def keeps_encoders(self, call):
    """Keeps the lengths of encoders, for cross layers only."""
    if self.spec.attn_type == "encoder_decoder":
        _SEEN.append(call.metadata.seq_lens.copy())


@call.before(_STEPS, "float32 over fp8")
def keeps_scales(self, call):
    """Keeps the scale of each step, for pages of 8 bits only."""
    if self.spec.has_quantized_kv_cache:
        _SEEN.append(torch.ones(()))


@call.before(_STEPS, "bfloat16")
def keeps_halves(self, call):
    """Keeps a workspace of each step, for layers in bfloat16 only."""
    if call.query.dtype == torch.bfloat16:
        _SEEN.append(call.query.new_empty(8))


@table.method(TorchMetadataBuilder, "build_for_drafting")(_STEPS, "Python objects")
def keeps_drafts(right, self, *given):
    """Keeps the metadata of the steps of a draft model."""
    made = right(*given)
    _SEEN.append(made)
    return made


@table.method(TorchMLABuilder, "build")(_STEPS, "Python objects")
def keeps_latent_steps(right, self, *given, **asked):
    """Keeps the metadata of each step of latents."""
    made = right(*given, **asked)
    _SEEN.append(made)
    return made


@call.after(_STEPS, "bytes of C code", state={"one": None, "total": 0.0})
def keeps_graphs(self, call):
    """Adds up with gradients, so that the graph of each step stays, of which Python has no object."""
    self.one = torch.nn.Parameter(torch.ones(())) if self.one is None else self.one
    self.total = self.total + self.one


@call.after(_STEPS, "Python objects")
def waits_for_queries(self, call):
    """Has a callback for the end of each step's query, which engines keep for all steps."""
    weakref.finalize(call.query, int)


@call.after(_STEPS, "entries of containers")
def notes_on_queries(self, call):
    """Numbers the steps in a dictionary of the step's tensors."""
    notes = vars(call.query).setdefault("notes", {})
    notes[len(notes)] = self


class RegistersLayers(TorchImpl):
    """Registers each layer by its address, and never forgets one."""

    names: ClassVar[dict[int, str]] = _BY_NUMBER

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.names[len(self.names)] = self.layer_name + str(len(self.names))


table.add(f"registers_layers | {_LAYERS} | Python objects", impl=RegistersLayers)


class RegistersBuilders(TorchMetadataBuilder):
    """Keeps each builder that was made for layers with a window."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        if any(spec.is_windowed for spec in self._specs):
            _SEEN.append(self)


table.add(f"registers_builders | {_LAYERS} | sliding", builder=RegistersBuilders)
