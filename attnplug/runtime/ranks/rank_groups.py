"""Context parallelism over a process group of torch.distributed, and the comparison of plans across ranks.

Compares the steps of all ranks, and names a rank that died, hangs, or runs another step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import hashlib
import json
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attnplug.core.arguments import instance, torch_device
from attnplug.core.checks import check_positive
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import RankFailureError, SpecError
from attnplug.runtime.plan.model_plan import ModelPlan


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
        SpecError: `plan` is not a ModelPlan, or `group` not a process group.
        RankFailureError: a rank planned otherwise than most ranks; it names the rank and the first layer. Also if a
            rank died, or does not answer within the timeout of the group.
    """
    instance("plan", plan, ModelPlan, SpecError)
    instance("group", group, dist.ProcessGroup, SpecError)
    gathered: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(gathered, (plan.digest(), plan.layer_digests()), group=group)
    except RuntimeError as error:
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        text = f"rank {group.rank()} of {group.size()} could not compare its plan with the others: {first}"
        raise RankFailureError(text) from error
    compare_digests(gathered)


def compare_digests(gathered: list[tuple[str, dict[str, str]]]) -> None:
    """RankFailureError if the digests of a plan and its layers, `[rank]`, are not all those of most ranks."""
    plans = [whole for whole, _ in gathered]
    # If two halves differ, the one with rank 0 counts as right.
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


_BYTES = 512
_POLL_SECONDS = 50e-6


@dataclasses.dataclass(frozen=True, slots=True)
class _Report:
    """The message of one rank at the beginning and the end of a step."""

    step: int
    digest: str = ""
    error: str = ""

    def to_tensor(self) -> torch.Tensor:
        error = self.error
        # Cut before it is encoded, because JSON that is cut is none; a character may take twelve bytes.
        while len(text := json.dumps(dataclasses.asdict(dataclasses.replace(self, error=error)))) > _BYTES:
            error = error[: len(error) * 3 // 4]
        return torch.tensor(list(text.encode().ljust(_BYTES)), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> _Report:
        return cls(**json.loads(bytes(tensor.tolist())))


class RankWatch:
    """Runs steps that all ranks of a group run together, and ends a step on every rank if one of them fails.

    Ranks exchange a few bytes before and after each step, so no rank uses the result of a step that another one did
    not finish.

    Args:
        group: of gloo, for these messages alone: `torch.distributed.new_group(backend="gloo")`.
        timeout: seconds that a rank waits for the others, after its own part is done. The groups of the model need
            a timeout too, in `init_process_group` or `new_group`, because their exchanges wait as long as that. Give
            groups of NCCL a longer one than this: when it is over, NCCL ends the process without naming a rank.
        device: a GPU whose work ends with the step; the step waits for it, but not longer than `timeout`.

    Raises:
        SpecError: a group of another backend, or a timeout that is not positive.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout: float = 30.0, device: torch.device | str = "cpu"
    ) -> None:
        instance("group", group, dist.ProcessGroup, SpecError)
        if dist.get_backend(group) != dist.Backend.GLOO:
            remedy = 'make one by torch.distributed.new_group(backend="gloo")'
            raise SpecError("group", dist.get_backend(group), "must be of gloo", remedy)
        self.timeout = check_positive("timeout", timeout)
        self.size, self.rank = group.size(), group.rank()
        self._group, self._device, self._step = group, torch_device("device", device, SpecError), 0
        self._failure: RankFailureError | None = None

    @contextlib.contextmanager
    def step(self, digest: str = "") -> Iterator[None]:
        """Run the block as one step of all ranks; `digest` is text about it, equal on all of them.

        If the block raises, the others learn of it, and the error is raised here. RankFailureError of an exchange
        is raised with the name of the rank that caused it.

        Raises:
            RankFailureError: a rank died, did not answer in time, raised an error, or runs another step.
        """
        if self._failure is not None:
            raise RankFailureError(f"an earlier step failed: {self._failure}", self._failure.ranks)
        self._step += 1
        # A digest of the text, because messages have a fixed size.
        digest = hashlib.sha256(digest.encode()).hexdigest()
        own = _Report(self._step, digest)
        reports = self._exchange(own)
        self._check_reports(reports)
        self._check_alike({**reports, self.rank: own})
        try:
            yield
            self._wait_for_device()
        except RankFailureError as error:
            # The exchange failed because of another rank, whose report or silence tells which.
            self._check_reports(self._exchange(_Report(self._step)), error)
            self._failure = error
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self._failure = RankFailureError(f"rank {self.rank} of {self.size} failed: {text}", [self.rank])
            # Their reports are received too: a message that nobody takes would make them wait.
            self._exchange(_Report(self._step, error=text))
            raise
        self._check_reports(self._exchange(_Report(self._step)))

    def _wait_for_device(self) -> None:
        if self._device.type != "cuda":
            return
        ended: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        limit = time.monotonic() + self.timeout
        ended.record(torch.cuda.current_stream(self._device))
        # NCCL waits on the device, where no error ends it: a synchronisation would wait with it.
        while not ended.query():
            if time.monotonic() > limit:
                text = f"the device of rank {self.rank} did not end the step in {self.timeout:g} s"
                raise RankFailureError(text)
            time.sleep(_POLL_SECONDS)

    def _exchange(self, report: _Report) -> dict[int, _Report | str]:
        """The report of each other rank, or the reason why there is none."""
        limit = time.monotonic() + self.timeout
        sent: list[tuple[Any, torch.Tensor]] = []
        for rank in self._others():
            # A rank that died gets none.
            with contextlib.suppress(RuntimeError):
                message = report.to_tensor()
                # With its message, which must live until it is sent.
                sent.append((dist.isend(message, group=self._group, group_dst=rank), message))
        found: dict[int, _Report | str] = {}
        under_way: dict[int, tuple[Any, torch.Tensor]] = {}
        for rank in self._others():
            message = torch.empty(_BYTES, dtype=torch.uint8)
            try:
                under_way[rank] = dist.irecv(message, group=self._group, group_src=rank), message
            except RuntimeError as error:
                found[rank] = _reason(error, self.timeout)
        for rank, (work, message) in under_way.items():
            try:
                work.wait(_until(limit))
                found[rank] = _Report.from_tensor(message)
            except RuntimeError as error:
                found[rank] = _reason(error, self.timeout)
        # It waits for the receivers, because gloo sends a message only once the other rank receives it.
        for work, _ in sent:
            with contextlib.suppress(RuntimeError):
                work.wait(_until(limit))
        return found

    def _check_alike(self, reports: Mapping[int, _Report | str]) -> None:
        """RankFailureError if a rank runs another step than most ranks; of two halves that with rank 0 is right."""
        steps = [reports[rank] for rank in range(self.size)]
        usual = max(steps, key=lambda each: (steps.count(each), each == steps[0]))
        others = [rank for rank, each in enumerate(steps) if each != usual]
        if others:
            self._fail(dict.fromkeys(others, "runs another step than the others"), None)

    def _check_reports(
        self, reports: Mapping[int, _Report | str], cause: RankFailureError | None = None
    ) -> None:
        """RankFailureError if a rank gave no report, reports an error, or is in another step."""
        wrong = {
            rank: report if isinstance(report, str) else f"failed: {report.error}"
            for rank, report in sorted(reports.items())
            if isinstance(report, str) or report.error
        }
        if wrong:
            self._fail(wrong, cause)

    def _fail(self, wrong: Mapping[int, str], cause: RankFailureError | None) -> None:
        text = "; ".join(f"rank {rank} of {self.size} {what}" for rank, what in wrong.items())
        text += f"; step {self._step} has no result on rank {self.rank}"
        self._failure = RankFailureError(text, [*wrong])
        raise self._failure from cause

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


def _until(limit: float) -> dt.timedelta:
    # Not 0 after the time is over, because the message of a later rank may be here.
    return dt.timedelta(seconds=max(limit - time.monotonic(), 0.01))


def _reason(error: RuntimeError, timeout: float) -> str:
    text = str(error).lower()
    if "closed" in text or "reset" in text or "refused" in text or "broken pipe" in text:
        return "has died: its connection is closed"
    return f"did not answer within {timeout:g} s"
