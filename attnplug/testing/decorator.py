"""`@parametrize_with_checks(Backend)`: runs the conformance kit in the tests of a backend."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import BackendUnavailableError, SpecError
from attnplug.registry.devices import DeviceLike, resolve_device
from attnplug.testing.conformance.check import SHRINK_SECONDS, Check, CheckSkipped, Level
from attnplug.testing.conformance.check_filter import checked_reasons, known_reasons
from attnplug.testing.conformance.listing import conformance_checks
from attnplug.testing.conformance.mistakes.smallest_step import Shrinker
from attnplug.testing.conformance.suites import refusals
from attnplug.testing.isolation.results import node_command

if TYPE_CHECKING:
    import pytest


def parametrize_with_checks(
    backend: type[AttentionBackend],
    *,
    known_failures: Mapping[str, str] | None = None,
    level: Level | str = Level.SMOKE,
    device: DeviceLike = None,
    options: Any = None,
    shrink: float = SHRINK_SECONDS,
) -> pytest.MarkDecorator:
    """Run a test function once for each conformance check of `backend`, under the check's id.

    ```python
    @parametrize_with_checks(AcmeBackend, known_failures={"correct/decode-*": "acme-kernels#12"})
    def test_conformance(check):
        check()
    ```

    Args:
        backend: the class.
        known_failures: why a check fails, by its id or a pattern of ids such as `correct/decode-*`. A known
            failure that passes fails the test, so that the list stays true.
        level: "smoke" or "full".
        device: in a form that `attnplug.select` accepts; default the current device. If the backend does not run on
            the default device, the one test is skipped with the reasons.
        options: a mapping or an instance of the backend's `Options`, with which layers are made; default the
            defaults. ATTNPLUG_OPTIONS is not read.
        shrink: seconds in which the first wrong answers of each mistake are shrunk to their smallest failing
            steps, which a failure prints as a test; 0 shrinks none.

    Raises:
        PolicyError: a reason is empty, or an id matches no check; the error names the nearest ids. An option is
            unknown or refused.
        BackendUnavailableError: the backend does not run on the given `device`.
        SpecError: the backend, level or device is invalid.
    """
    import pytest

    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise SpecError("backend", backend, "must be a subclass of AttentionBackend, not its name")
    known = checked_reasons({} if known_failures is None else known_failures, "known_failures")
    where = resolve_device(device)
    reasons = refusals(backend, where)
    if reasons:
        why = f"{backend.get_name()} does not run here on {where}: {'; '.join(reasons)}"
        if device is not None:
            raise BackendUnavailableError(why)
        return pytest.mark.parametrize(
            "check", [pytest.param(None, id="device", marks=pytest.mark.skip(reason=why))]
        )
    checks = conformance_checks(backend, device=where, level=level, options=options)
    other = Level.FULL if level == Level.SMOKE else Level.SMOKE
    by_id = known_reasons(
        known,
        [check.id for check in checks],
        source="known_failures",
        elsewhere=lambda: [
            check.id for check in conformance_checks(backend, device=where, level=other, options=options)
        ],
    )
    return pytest.mark.parametrize("check", as_parameters(checks, by_id, shrink=shrink))


def as_parameters(
    checks: list[Check] | tuple[Check, ...],
    known: Mapping[str, str],
    rerun: Callable[[str], str | None] = lambda check: node_command(),
    shrink: float = 0.0,
) -> list[Any]:
    """Checks as pytest parameters: CheckSkipped becomes a pytest skip, and checks of `known` must fail.

    A failure has a note with the line that `rerun` gives for the id, which runs the check again. The first failure of
    each mistake has one with its smallest failing step, if `shrink` seconds for all are enough to find it.
    """
    import pytest

    shrinker = Shrinker(shrink)

    def marks(check: Check) -> list[pytest.MarkDecorator]:
        fails = [pytest.mark.xfail(strict=True, reason=known[check.id])] if check.id in known else []
        return [*fails, pytest.mark.xdist_group(check.group)] if check.group else fails

    return [
        pytest.param(
            dataclasses.replace(
                check, run=functools.partial(_run, check, rerun, None if check.id in known else shrinker)
            ),
            id=check.id,
            marks=marks(check),
        )
        for check in checks
    ]


def _run(check: Check, rerun: Callable[[str], str | None], shrinker: Shrinker | None) -> None:
    import pytest

    __tracebackhide__ = True
    try:
        with _one_thread():
            check()
    except CheckSkipped as why:
        pytest.skip(why.text)
    except Exception as problem:
        if shrinker is not None:
            with _one_thread():
                shrinker.shrink(problem)
        if line := rerun(check.id):
            problem.add_note(f"rerun: {line}")
        raise


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of torch: tensors of the kit are small, and more threads only wait for those of other processes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
