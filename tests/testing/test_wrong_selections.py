"""Backends that read a selection wrongly fail the kit, and the mistake is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catching import failures, variant

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import Device, Feature, Selection, SparseSpec
from attnplug.testing.conformance import ConformanceError
from attnplug.testing.conformance.cases.cases import Case
from attnplug.testing.conformance.declared.refusals import checks as refusals
from attnplug.testing.conformance.numbers.correctness import check_case
from attnplug.testing.conformance.numbers.sparse_selections import checks
from attnplug.testing.conformance.target import Target

Change = Callable[[Selection, Any], Selection]


def reads(change: Change) -> type[TorchImpl]:
    """An impl that attends `change(selection, metadata)`."""

    class Impl(TorchImpl):
        def attend(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **more):
            if self.spec.sparse is not None and attn_metadata.selection is not None:
                read = change(attn_metadata.selection, attn_metadata)
                attn_metadata = dataclasses.replace(attn_metadata, selection=read)
            return super().attend(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)

    return Impl


def _shifted(selection: Selection, metadata: Any) -> Selection:
    """Every position one less; position 0 is lost."""
    early = selection.positions - 1
    kept = (early >= 0).sort(dim=1, descending=True, stable=True)
    positions = early.gather(1, kept.indices).masked_fill(~kept.values, -1)
    return Selection(positions, kept.values.sum(1).int())


def _last(selection: Selection, metadata: Any) -> Selection:
    """As many keys as the indexer may choose, the last ones."""
    _, at = metadata.rows()
    own = torch.from_numpy(at)[:, None] - torch.arange(24)
    counts = (own >= 0).sum(1).int()
    return Selection(own.clamp(min=-1).int(), counts)


def _last_key_of_padding(selection: Selection, metadata: Any) -> Selection:
    """One more key where rows are padded: the last of the request, which decodes see."""
    requests, _ = metadata.rows()
    positions, counts = selection.positions.clone(), selection.counts.clone()
    for row, request in enumerate(requests.tolist()):
        last, count = int(metadata.seq_lens[request]) - 1, int(counts[row])
        if count < 24 and last not in positions[row, :count].tolist():
            positions[row, count], counts[row] = last, count + 1
    return Selection(positions, counts)


class Dense(TorchImpl):
    """Attends all keys."""

    def attend(self, *args: Any, **more: Any) -> torch.Tensor:
        spec, self.spec = self.spec, self.spec.replace(sparse=None)
        try:
            return super().attend(*args, **more)
        finally:
            self.spec = spec


@pytest.mark.parametrize(
    ("impl", "shape", "named"),
    [
        (Dense, "mixed", "selection ignored: all keys attended"),
        (reads(_shifted), "mixed", "selection one position early"),
        (reads(_last), "mixed", "selection taken as the last keys"),
        (reads(_last_key_of_padding), "decode", "padding of the selection (-1) taken as the last key, once"),
    ],
    ids=["dense", "shifted", "last", "padding"],
)
def test_wrong_keys_are_caught_and_the_mistake_is_named(
    impl: type[TorchImpl], shape: str, named: str
) -> None:
    target = Target(variant("WRONG", impl=impl), Device("cpu"))
    case = Case(target.spec(sparse=SparseSpec("token_topk", 24)), shape, 16, "NHD")
    with pytest.raises(ConformanceError) as caught:
        check_case(target, case)
    assert caught.value.named == named


class Early(TorchMetadataBuilder):
    """Reads the selection when the step is built."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if made.selection is not None:
            made.selection = Selection(made.selection.positions.clone(), made.selection.counts.clone())
        return made


class Trusting(Dense):
    """Attends all keys if the step has no selection."""

    def attend(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **more):
        attend = Dense.attend if attn_metadata.selection is None else TorchImpl.attend
        return attend(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **more)


def _checked_nowhere(selection: Selection, metadata: Any) -> Selection:
    class Unchecked(Selection):
        def check_values(self, *_: Any) -> None: ...

    return Unchecked(selection.positions, selection.counts)


def _planned_by_the_first_layer() -> Change:
    """No more keys than the first layer of a step chose."""
    plans: dict[int, tuple[Any, torch.Tensor]] = {}

    def change(selection: Selection, metadata: Any) -> Selection:
        _, most = plans.setdefault(id(metadata), (metadata, selection.counts.clone()))
        counts = torch.minimum(selection.counts, most)
        kept = torch.arange(selection.positions.shape[1]) < counts[:, None]
        return Selection(selection.positions.masked_fill(~kept, -1), counts)

    return change


@pytest.mark.parametrize(
    ("parts", "check", "says"),
    [
        ({"builder": Early}, "selection/late-token_topk", "not given"),
        ({"impl": Trusting}, "selection/required-token_topk", "was accepted; it must raise a BatchError"),
        ({"impl": reads(_checked_nowhere)}, "selection/values-block", "was accepted; it must raise a BatchError"),
        ({"impl": reads(_planned_by_the_first_layer())}, "selection/late-block", "of more keys for the next layers"),
        ({"impl": Dense}, "selection/order-token_topk", "with the chosen keys in another order"),
    ],
    ids=["early", "trusting", "unchecked", "planned", "dense"],
)  # fmt: skip
def test_the_checks_of_selections_catch(parts: dict[str, Any], check: str, says: str) -> None:
    found = failures(variant("WRONG", **parts), checks)
    assert says in str(found[check])


def test_torch_passes_them_and_a_backend_without_the_feature_has_none() -> None:
    assert failures(variant("RIGHT"), checks) == {}
    without = variant("WITHOUT", features=variant("X").features & ~Feature.SPARSE)
    assert list(checks(Target(without, Device("cpu")))) == []
    assert failures(without, refusals) == {}
