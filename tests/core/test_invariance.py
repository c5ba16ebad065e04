"""The words of `LayerSpec.invariance`: how they are read, and who refuses them with which reason."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from attnplug.core import Device, Feature, LayerSpec
from attnplug.core.composite.backend import composite_backend
from attnplug.core.errors import SpecError
from attnplug.registry.default import list_backends
from attnplug.runtime.batch.cascade import cascade_prefix_len
from attnplug.runtime.plan.sharding import refusal

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32")


@pytest.mark.parametrize(
    ("given", "read"),
    [((), ()), (["rows", "batch", "rows"], ("batch", "rows")), (("heads",), ("heads",))],
)
def test_words_are_kept_once_and_in_one_order(given: Any, read: tuple[str, ...]) -> None:
    spec = SPEC.replace(invariance=given)
    assert spec.invariance == read
    assert LayerSpec.from_dict(spec.to_dict()) == spec
    assert (Feature.INVARIANCE in spec.required_features()) is bool(read)


@pytest.mark.parametrize("given", ["batch", ("order",), (1,), None, {"batch"}, ("batch", "Rows")])
def test_other_values_are_refused_by_name(given: Any) -> None:
    with pytest.raises(SpecError, match=r"invariance=.* must be a tuple of words among batch, rows, heads"):
        SPEC.replace(invariance=given)


KEPT = {"TORCH": ("batch",), "TRITON": ("batch", "rows", "heads")}


def test_a_backend_refuses_each_word_that_it_does_not_keep() -> None:
    for name, backend in list_backends().items():
        for word in ("batch", "rows", "heads"):
            reasons = backend.for_layer(SPEC).validate_configuration(
                SPEC.replace(invariance=(word,)), Device.parse("sm90")
            )
            codes = {reason.code for reason in reasons}
            assert ("invariance" in codes) is (word not in KEPT.get(name, ())), (name, word)
            # TORCH keeps it on a CPU alone.
            assert bool(codes) is (name != "TRITON"), (name, word)


def test_torch_keeps_batch_on_a_cpu_alone() -> None:
    torch_backend = list_backends()["TORCH"]
    asked = SPEC.replace(invariance=("batch",))
    assert torch_backend.validate_configuration(asked, Device.parse("cpu")) == []
    (reason,) = torch_backend.validate_configuration(asked, Device.parse("sm90"))
    assert reason.code == "combination"
    (reason,) = torch_backend.validate_configuration(
        asked.replace(invariance=("batch", "rows")), Device.parse("cpu")
    )
    assert str(reason) == "invariance batch+rows not supported: kind rows is not batch"


def test_a_composite_keeps_what_both_keep_but_no_rows() -> None:
    torch_backend: Any = list_backends()["TORCH"]

    class Keeps(torch_backend):
        supported_invariances: ClassVar[tuple[str, ...]] = ("batch", "rows", "heads")

        @staticmethod
        def get_name() -> str:
            return "KEEPS"

    class Other(Keeps):
        supported_invariances: ClassVar[tuple[str, ...]] = ("rows", "batch")

        @staticmethod
        def get_name() -> str:
            return "OTHER"

    pair = composite_backend(Keeps, Other)
    assert pair.supported_invariances == ("batch",)
    assert pair.validate_configuration(SPEC.replace(invariance=("batch",)), Device.parse("cpu")) == []
    assert pair.validate_configuration(SPEC.replace(invariance=("rows",)), Device.parse("cpu"))


def test_no_shared_prefix_is_attended_once_and_ranks_share_no_keys() -> None:
    class Eager:
        config: ClassVar[Any] = None

        def use_cascade_attention(self, **given: Any) -> bool:
            raise AssertionError("is not asked")

    common: Any = type("Common", (), {"max_seq_len": 64})()
    builder: Any = Eager()
    assert cascade_prefix_len(builder, [SPEC.replace(invariance=("batch",))], 32, common) == 0
    reason = refusal(SPEC.replace(invariance=("batch",)))
    assert reason is not None
    assert reason.field == "invariance"
