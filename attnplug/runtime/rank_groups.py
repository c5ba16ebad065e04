"""Context parallelism over a process group of torch.distributed, and the comparison of plans across ranks."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attnplug.core.arguments import instance
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import RankFailureError, SpecError

if TYPE_CHECKING:
    from attnplug.runtime.model_plan import ModelPlan


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ContextParallelGroup(ContextParallel):
    """A place among ranks together with their process group; it equals the plain place."""

    # Weak, because a plan may outlive the group: processes of gloo that exit with a group abort.
    _group: weakref.ref[dist.ProcessGroup] | None = dataclasses.field(default=None, repr=False)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None once it is destroyed."""
        return None if self._group is None else self._group()

    def __reduce__(self) -> tuple[type[ContextParallel], tuple[int, int, int]]:
        # A process group is of its own process, so a copy in another one has the place alone.
        return ContextParallel, (self.size, self.rank, self.interleave)


def context_parallel(group: dist.ProcessGroup | DeviceMesh, interleave: int = 1) -> ContextParallelGroup:
    """The place of this process among the ranks that share the tokens of each request, for `attnplug.plan`.

    Args:
        group: a process group, or one dimension of a DeviceMesh, such as `mesh["cp"]`.
        interleave: tokens that a rank gets in a run; it must divide the block size.

    Raises:
        SpecError: a mesh of several dimensions; this process is not in the group; an interleave below 1.
    """
    found: object = group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            remedy = 'take one by its name, such as mesh["cp"]'
            raise SpecError("group", f"a mesh of {group.ndim} dimensions", "must have one dimension", remedy)
        found = group.get_group()
    if not isinstance(found, dist.ProcessGroup):
        limit = "must be a ProcessGroup that this process is in, or one dimension of a DeviceMesh"
        raise SpecError("group", type(group).__name__, limit)
    return ContextParallelGroup(found.size(), found.rank(), interleave, weakref.ref(found))


def check_same_plan(plan: ModelPlan, group: dist.ProcessGroup) -> None:
    """Compare the decisions of a plan across ranks by their digest; every rank of the group calls it.

    With NCCL each process must have set its own GPU by `torch.cuda.set_device` before.

    Raises:
        SpecError: `plan` is no ModelPlan, or `group` no process group.
        RankFailureError: a rank planned otherwise than most ranks; it names the rank and the first layer. Also if a
            rank died, or does not answer within the timeout of the group.
    """
    for field, given, kind in (("plan", plan, _model_plan()), ("group", group, dist.ProcessGroup)):
        instance(field, given, kind, SpecError)
    gathered: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(gathered, (plan.digest(), plan.layer_digests()), group=group)
    except RuntimeError as error:
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise RankFailureError(
            f"rank {group.rank()} of {group.size()} could not compare its plan with the others: {first}"
        ) from error
    compare_digests(gathered)


def _model_plan() -> type[ModelPlan]:
    # A plan imports this module.
    from attnplug.runtime.model_plan import ModelPlan

    return ModelPlan


def compare_digests(gathered: list[tuple[str, dict[str, str]]]) -> None:
    """RankFailureError if the digests of a plan and its layers, `[rank]`, are not all those of most ranks."""
    plans = [whole for whole, _ in gathered]
    # Of two halves the one with rank 0 counts as right.
    usual = max(plans, key=lambda each: (plans.count(each), each == plans[0]))
    others = [rank for rank, whole in enumerate(plans) if whole != usual]
    if not others:
        return
    right, wrong = gathered[plans.index(usual)][1], gathered[others[0]][1]
    layers = [name for name in {**right, **wrong} if right.get(name) != wrong.get(name)]
    what = f"layer {layers[0]}" if layers else "the number of blocks, the device, or the measured times"
    if layers[1:]:
        what += f" and {len(layers) - 1} more"
    names = ", ".join(map(str, others))
    raise RankFailureError(
        f"rank {names} of {len(plans)} planned otherwise than the others: {what} differs; give all ranks the same "
        "model, versions, environment variables, and memory or num_blocks",
        others,
    )
