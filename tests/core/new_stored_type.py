"""A process in which the table of stored types has a row more; prints what everything that reads the table makes of it."""

from __future__ import annotations

import functools
import io
import json
import sys
from contextlib import redirect_stdout, suppress
from unittest import mock

from attnplug.core import kv_format
from attnplug.core.kv_format import KVFormat, KVFormats

ROW = KVFormat(
    name="acme_e5m2",
    aliases=("acme",),
    family="acme",
    dtype="float8_e5m2",
    size=1,
    layer_scales=True,
    feature="fp8_kv",
    rounding="attnplug.ops.storage:round_to_float",
    is_common=True,
)
kv_format.TABLE = KVFormats((*kv_format.TABLE.rows, ROW))

import torch  # noqa: E402

import attnplug  # noqa: E402
from attnplug.backends.torch_native import TorchBackend  # noqa: E402
from attnplug.cli import main  # noqa: E402
from attnplug.cli.arguments import complete_kv_cache_dtypes  # noqa: E402
from attnplug.core import Device, Feature, LayerSpec  # noqa: E402
from attnplug.matrix import axes, which_backend  # noqa: E402
from attnplug.matrix.words import in_order  # noqa: E402
from attnplug.ops.storage import storage_dtype  # noqa: E402
from attnplug.registry.default import get_registry  # noqa: E402
from attnplug.registry.selection.nearest import nearest_misses  # noqa: E402
from attnplug.testing.conformance import conformance_checks  # noqa: E402
from attnplug.testing.conformance.check import Check  # noqa: E402
from attnplug.testing.conformance.declared import refusals  # noqa: E402
from attnplug.testing.conformance.target import Target  # noqa: E402
from attnplug.testing.oracle import stored_values  # noqa: E402

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", kv_cache_dtype="acme")
STORED = (*TorchBackend.supported_kv_cache_dtypes, "acme_e5m2")
Acme = type(
    "Acme",
    (TorchBackend,),
    {"supported_kv_cache_dtypes": STORED, "get_name": staticmethod(lambda: "ACME")},
)
CPU = Device("cpu")


def output(*command: str) -> str:
    """What a command of attnplug prints."""
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit), mock.patch("sys.argv", ["attnplug", *command]):
        main()
    return " ".join(said.getvalue().split())


@functools.cache
def checks(backend: type[attnplug.AttentionBackend], *only: str) -> dict[str, Check]:
    """The kit's checks by id, without the areas that are slow to list and not in `only`."""
    return {check.id: check for check in conformance_checks(backend, device="cpu", only=only)}


def told(check_id: str, backend: type[attnplug.AttentionBackend]) -> str:
    """How one check of the kit ends."""
    try:
        checks(backend, "declared/*", "cache/*", "refused/*")[check_id]()
    except AssertionError as problem:
        return str(problem)
    return "passed"


refused = attnplug.explain(SPEC.replace(dtype="bfloat16"), "sm90")
json.dump(
    {
        "layer": [
            SPEC.resolved_kv_cache_dtype,
            SPEC.has_quantized_kv_cache,
            *SPEC.required_features().names(),
        ],
        "pages": str(storage_dtype(SPEC)),
        "oracle": stored_values(torch.tensor([1.1, 1e9]), SPEC, 2.0).tolist(),
        "words": in_order("kv_cache_dtype", ["float16", "acme_e5m2", "fp8_e4m3", "acme", "auto"]),
        "axis": axes.axes_of(TorchBackend)["kv_cache_dtype"],
        "goes with": [name for name in axes.FEATURES if axes.goes_with(name, "kv_cache_dtype", "acme_e5m2")],
        "choices": which_backend.KV_CHOICES,
        "feature": Feature.FP8_KV.ask.values,
        "undeclared": refusals._undeclared_values(Target(TorchBackend, CPU))["kv_cache_dtype"],
        "refused": told("refused/kv-cache-dtype", TorchBackend),
        "reasons": [str(reason) for reason in TorchBackend.validate_configuration(SPEC, CPU)],
        "checks": {
            name: told(name, Acme)
            for name in (
                "declared/kv_cache_dtype-acme_e5m2",
                "cache/stored-acme_e5m2",
                "refused/kv-cache-dtype",
            )
        },
        "cases": [name for name in checks(Acme, "*") if "acme" in name],
        "nearest": [str(miss) for miss in nearest_misses(get_registry(), refused)],
        "completion": complete_kv_cache_dtypes("ac"),
        "help": output("explain", "--help"),
        "explain": output("explain", "--kv-cache-dtype", "acme", "--device", "cpu", "--dtype", "float32"),
    },
    sys.stdout,
)
