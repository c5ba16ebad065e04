"""The wrappers of one builder: one per group of layers, phase and captured batch size, made at first use."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch

from attnplug._system.one_commit import NotCopied
from attnplug.backends.flashinfer.compiling import announced
from attnplug.backends.flashinfer.groups import PlanGroup
from attnplug.backends.flashinfer.library import Library
from attnplug.backends.flashinfer.modules import Module
from attnplug.backends.flashinfer.planned_wrapper import (
    PlanCost,
    PlannedWrapper,
    PlanSpace,
    captured_bytes,
    one_request,
    schedule_bytes,
    workspace_bytes,
)
from attnplug.core.device import Device
from attnplug.core.errors import BatchError
from attnplug.core.spec import Phase


class Wrappers(NotCopied):
    """Makes planned wrappers and their workspace.

    Args:
        library: FlashInfer.
        groups: layer names by group.
        page_size: tokens of a page.
        device: where the wrappers run.
        max_num_seqs: requests that the host buffers have room for at first.
        captured_sizes: batch sizes that will be captured.
    """

    def __init__(
        self,
        library: Library,
        groups: Mapping[PlanGroup, Sequence[str]],
        page_size: int,
        device: torch.device,
        max_num_seqs: int,
        captured_sizes: Sequence[int] = (),
    ) -> None:
        self.groups = groups
        self._multiprocessors, kind = 1, Device(device.type)  # elsewhere tests plan what a GPU would
        if device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            kind = Device("cuda", torch.cuda.get_device_capability(device))
        self.workspace_bytes = workspace_bytes(groups, self._multiprocessors, captured_sizes)
        """Bytes that the float workspace must have."""
        self._library = library
        self._page_size = page_size
        self._device = device
        self._max_num_seqs = max_num_seqs
        # Chosen here, so that an option that cannot be honoured is refused before the first step.
        self._modules: dict[tuple[PlanGroup, str], Module] = {
            (group, phase): group.module(phase, kind) for group in groups for phase in ("decode", "prefill")
        }
        self._workspace: torch.Tensor | None = None
        self._spaces: dict[tuple[PlanGroup, str, bool], PlanSpace] = {}
        self._wrappers: dict[tuple[PlanGroup, str, int], PlannedWrapper] = {}
        self.generation = 0
        """Grows when the wrappers are dropped for a new workspace."""

    @property
    def workspace(self) -> torch.Tensor:
        """The float workspace, uint8, allocated at first use unless another builder's was set."""
        if self._workspace is None:
            self._workspace = torch.zeros(self.workspace_bytes, dtype=torch.uint8, device=self._device)
        return self._workspace

    @workspace.setter
    def workspace(self, buffer: torch.Tensor) -> None:
        size = buffer.numel() * buffer.element_size()
        if size < self.workspace_bytes:
            limit = f"bytes are less than the {self.workspace_bytes} that these layers need"
            raise BatchError("workspace", size, limit, "share the largest of the builders' workspaces")
        if self._workspace is not None and self._workspace is not buffer:
            # A wrapper cannot change the buffer that it was made with.
            self._wrappers.clear()
            self._spaces.clear()
            self.generation += 1
        self._workspace = buffer

    @property
    def costs(self) -> dict[str, PlanCost]:
        """The cost of planning so far, by "phase: group"."""
        return {
            f"{phase}{' in graphs' if captured else ''}: {group}": space.cost
            for (group, phase, captured), space in self._spaces.items()
        }

    def of(self, group: PlanGroup, phase: str) -> PlannedWrapper:
        """The wrapper of a group's layers for "decode" or "prefill".

        Raises:
            BatchError: a group that the builder does not have.
            PluginError: a module is not built, and cannot be compiled here.
        """
        wrapper = self._wrappers.get((group, phase, 0))
        return self._make(group, phase, 0, {}) if wrapper is None else wrapper

    def captured(self, group: PlanGroup, batch_size: int, indices: torch.Tensor) -> PlannedWrapper:
        """The decode wrapper of a captured batch size; `indices` is the buffer that its graph reads.

        Raises:
            BatchError: a batch size too large for the workspace, or as `of`.
            PluginError: as `of`.
        """
        wrapper = self._wrappers.get((group, "decode", batch_size))
        if wrapper is None:
            # The plain wrapper announces and loads the module; graph wrappers do not.
            self.of(group, "decode")
            needed, given = captured_bytes(group, self._multiprocessors, batch_size), self.workspace.nbytes
            if needed > given:
                limit = f"needs a workspace of {needed} bytes for layers {group}, and it has {given}"
                remedy = "name the size in BuilderConfig.cudagraph_batch_sizes"
                raise BatchError("batch size", batch_size, limit, remedy)
            arange = torch.arange(batch_size + 1, dtype=torch.int32, device=self._device)
            fixed = {
                "qo_indptr": arange,
                "kv_indptr": torch.zeros_like(arange),
                "last_page_len": torch.zeros_like(arange[1:]),
                "indices": indices,
            }
            wrapper = self._make(group, "decode", batch_size, fixed)
        return wrapper

    def warm_up(self, phase: Phase | None) -> None:
        """Make the wrappers of a phase, or of both, which loads their modules and compiles them if needed."""
        for group in self.groups:
            for each in ("decode", "prefill") if phase is None else (str(phase),):
                self.of(group, each)

    def _make(
        self, group: PlanGroup, phase: str, batch_size: int, fixed: dict[str, torch.Tensor]
    ) -> PlannedWrapper:
        built = self._modules.get((group, phase))
        if built is None:
            known = "; ".join(map(str, self.groups))
            limit = f"is not among the builder's groups: {known}"
            raise BatchError("layer", str(group), limit, "name the layer in BuilderConfig.layers")
        captured = batch_size > 0
        space = self._spaces.get((group, phase, captured))
        if space is None:
            size = schedule_bytes(group, built.template)
            space = self._spaces[group, phase, captured] = PlanSpace(self._device, self._max_num_seqs, size)
        names = self.groups[group]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        why = f"{phase} of layers {', '.join(names[:3])}{more}"
        with contextlib.nullcontext() if captured else announced(self._library, built, why):
            library = self._library
            if built.sinks:
                raw = library.sink_wrapper(self.workspace, built, fixed)
            elif phase == "prefill":
                raw = library.prefill_wrapper(self.workspace, built.template)
            else:
                raw = library.decode_wrapper(self.workspace, group.options.tensor_cores, fixed)
            longest = library.names_longest_query
            wrapper = PlannedWrapper(raw, built, group, phase, self._page_size, space, longest)
            if not captured:
                # A plain wrapper loads its module in its first plan.
                one = torch.zeros(1, dtype=torch.int32, device=self._device)
                wrapper.ensure(one_request(), one, group.causal)
                space.cost.plans, space.cost.seconds = 0, 0.0
        self._wrappers[group, phase, batch_size] = wrapper
        return wrapper
