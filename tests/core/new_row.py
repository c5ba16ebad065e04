"""A process in which the table of features has a row more; prints what everything that reads the table makes of it."""

from __future__ import annotations

import inspect
import io
import json
import sys
from contextlib import redirect_stdout, suppress
from unittest import mock

import attnplug.core.features as features

ROW = '    TELEPATHY = FeatureRow(field="telepathy", option="--telepathy", help="Keys not yet thought of.")\n'
source = inspect.getsource(features)
end_of_rows = source.index("\n    def names(")
exec(compile(source[:end_of_rows] + ROW + source[end_of_rows:], features.__file__, "exec"), features.__dict__)

import attnplug  # noqa: E402
from attnplug.cli import main  # noqa: E402
from attnplug.core import LayerSpec  # noqa: E402
from attnplug.matrix.design import answers  # noqa: E402
from attnplug.registry.default import get_registry  # noqa: E402
from attnplug.testing.conformance import conformance_checks  # noqa: E402

Feature, SIZES = features.Feature, {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float16"}


def told(check_id: str, backend: type[attnplug.AttentionBackend]) -> str:
    """How one check of the kit ends."""
    listed = conformance_checks(backend, device="cpu", only=[check_id])
    check = next(check for check in listed if check.id == check_id)
    try:
        check()
    except AssertionError as problem:
        return str(problem)
    return "passed"


def output(*command: str) -> str:
    """What a command of attnplug prints."""
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit), mock.patch("sys.argv", ["attnplug", *command]):
        main()
    return said.getvalue()


spec = LayerSpec(**SIZES, telepathy=True)  # type: ignore[arg-type]
backends = {name: offer.backend for name, offer in ((o.name, o) for o in get_registry().plugins.offers)}
cuda = attnplug.Device("cuda", (9, 0))
believer = type(
    "Believer", (backends["TORCH"],), {"features": backends["TORCH"].features | Feature.TELEPATHY}
)
try:
    LayerSpec(**SIZES, telepathie=True)  # type: ignore[arg-type]
    unknown = "accepted"
except TypeError as problem:
    unknown = str(problem)
json.dump(
    {
        "asked": spec.required_features().names(),
        "round trip": LayerSpec.from_dict(spec.to_dict())
        == spec.replace(telepathy=True)
        != LayerSpec(**SIZES),
        "unknown": unknown,
        "reasons": {
            name: [reason.code for reason in backend.validate_configuration(spec, cuda)]
            for name, backend in backends.items()
        },
        "believed": [str(reason) for reason in believer.validate_configuration(spec, cuda)],
        "kit refuses": told("refused/feature-telepathy", backends["TORCH"]),
        "kit misses": told("correct/untried-telepathy", believer),
        "matrix": {
            cell.phase: [reason.code for reason in reasons]
            for cell, reasons in answers(backends["TORCH"], cuda).items()
            if cell.feature == "telepathy"
        },
        "explain": output("explain", "--telepathy", "--device", "cpu"),
        "help": output("explain", "--help"),
    },
    sys.stdout,
)
