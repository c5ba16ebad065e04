"""What a user of the wheel writes: it must run, and mypy and pyright must follow its types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_type

import attnplug
from attnplug import AttentionBackend, Decision, Device, Feature, LayerSpec, Phase, Reason
from attnplug.errors import NoBackendError, SpecError

spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="float32", sliding_window=4096)
assert_type(spec.scale, float)
assert_type(spec.window, tuple[int, int])
assert_type(spec.dtype, str)

decision = attnplug.select(spec, Device("cpu"), Phase.DECODE)
assert_type(decision, Decision)
assert_type(decision.get_backend_cls(), type[AttentionBackend])
if decision.backend != "TORCH" or decision.level != "usable":
    raise SystemExit(f"expected a usable TORCH, got {decision}")

laptop = attnplug.explain(spec, "sm90", assume_installed="all")
reasons: list[Reason] = [reason for candidate in laptop.refused for reason in candidate.reasons]
per_layer: Mapping[str, Decision] = attnplug.select_layers({"model.layers.0": spec}, "cpu")
if Feature.SLIDING_WINDOW not in spec.required_features() or set(per_layer) != {"model.layers.0"}:
    raise SystemExit("a window was not asked for, or a layer was lost")

with attnplug.use("TORCH"):
    if attnplug.select(spec, "cpu").chosen_by != "attnplug.use":
        raise SystemExit("use(...) was not followed")
try:
    attnplug.select(LayerSpec(num_heads=7, num_kv_heads=2, head_size=64))
except SpecError as error:
    print(f"as it should: {error}")
try:
    attnplug.select(spec.replace(mm_prefix=True), "cpu")
except NoBackendError as refusal:
    print(f"as it should: {refusal}")
