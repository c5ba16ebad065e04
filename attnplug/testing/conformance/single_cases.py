"""The plainest layer in all kinds of batches, and the same layer with one other value at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from attnplug.testing.conformance.cases import Case, CaseSearch
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.target import Target
from attnplug.testing.design.compiling import compile_key

_MOST_COMPILE_KEYS = {Level.SMOKE: 3, Level.FULL: 12}


def single_cases(target: Target, shapes: Sequence[str] = ("mixed", "decode")) -> list[Case]:
    """The plainest case of each shape, then those that differ from it in one value, in each of `shapes`.

    If the backend has compile keys, only the cases of the first few keys are kept.
    """
    search = CaseSearch(target)
    known = search.axes["shape"]
    wanted = [shape for shape in shapes if shape in known] or known[:1]
    rows = [{"shape": shape} for shape in known]
    for axis, values in search.axes.items():
        if axis != "shape":
            rows += [{"shape": shape, axis: value} for value in values[1:] for shape in wanted]
    cases: dict[str, Case] = {}
    keys: set[Hashable] = set()
    for fixed in rows:
        row = search.complete(fixed)
        if row is None or search.reasons(row):
            continue
        case = search.case(row)
        key = compile_key(target.backend, case.spec)
        if key is None or key in keys or len(keys) < _MOST_COMPILE_KEYS[target.level]:
            keys.add(key)
            cases.setdefault(case.id, case)
    return list(cases.values())
