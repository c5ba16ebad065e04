"""Which worker runs which group of checks, where workers may die of a check."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

__all__ = ["Groups"]


class Groups(LoadGroupScheduling):  # type: ignore[misc]
    """pytest-xdist's groups, of which a worker's death ends one check only.

    pytest-xdist itself gives all that a dead worker had been given to the others: what it had run, which
    leaves them with nothing to wait for, and the check that it died of, which they die of in turn. To a worker
    that comes later it gives a single check, and waits for ever.
    """

    def remove_node(self, node: Any) -> str | None:
        """Give what the worker has not run to others; the check that it was running, or None."""
        left = {
            group: pending
            for group, checks in self.assigned_work[node].items()
            if (pending := {check: False for check, is_done in checks.items() if not is_done})
        }
        running = next((next(iter(checks)) for checks in left.values()), None)
        if running is not None:
            first = next(iter(left))
            del left[first][running]
            left = {group: checks for group, checks in left.items() if checks}
        self.assigned_work[node] = left
        super().remove_node(node)
        for group in reversed(left):
            if group in self.workqueue:
                # What was begun is gone on with first.
                self.workqueue.move_to_end(group, last=False)
        return running

    def _reschedule(self, node: Any) -> None:
        """Give a worker what it waits for: it begins a check once it knows the next, or that there is none."""
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
