"""SparseSpec: which keys a sparse layer asks for, as a value, as JSON and in words."""

from __future__ import annotations

import json
import pickle

import pytest
from spec_strategies import SIZES

from attnplug.core import LayerSpec, SparseSpec
from attnplug.errors import SpecError

TOKENS, BLOCKS = SparseSpec("token_topk", 2048), SparseSpec("block", topk=16, block=64)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("tokens", 8), "sparse.kind='tokens' must be one of token_topk, block"),
        ((True, 8), "sparse.kind=True must be one of token_topk, block"),
        (("token_topk", 0), "sparse.topk=0 must be an integer of at least 1"),
        (("token_topk", 8.0), "sparse.topk=8.0 must be an integer of at least 1"),
        (("token_topk", True), "sparse.topk=True must be an integer of at least 1"),
        (("block", 8, 0), "sparse.block=0 must be an integer of at least 1"),
        (("token_topk", 8, 16), "sparse.block=16 must be 1 with kind token_topk; use kind block"),
        (("block", 8), "sparse.block=1 must be at least 2 with kind block: the tokens of a block"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(arguments: tuple[object, ...], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        SparseSpec(*arguments)  # type: ignore[arg-type]
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("sparse", [TOKENS, BLOCKS])
def test_a_spec_with_it_travels_as_json_and_as_a_pickle(sparse: SparseSpec) -> None:
    spec = LayerSpec(**SIZES, sparse=sparse)
    assert LayerSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    copied = pickle.loads(pickle.dumps(spec))
    assert (copied, hash(copied), copied.sparse) == (spec, hash(spec), sparse)
    assert spec.replace(head_size=128).sparse == sparse
    assert spec.replace(sparse=None) == LayerSpec(**SIZES)


def test_specs_of_other_keys_differ() -> None:
    asked = [None, TOKENS, BLOCKS, SparseSpec("token_topk", 8), SparseSpec("block", 16, 32)]
    assert len({LayerSpec(**SIZES, sparse=each) for each in asked}) == len(asked)


@pytest.mark.parametrize("value", [True, 2048, "token_topk", {"kind": "token_topk", "topk": 8}])
def test_a_shorthand_that_leaves_keys_open_is_told_the_remedy(value: object) -> None:
    with pytest.raises(SpecError, match="give a SparseSpec, such as") as caught:
        LayerSpec(**SIZES, sparse=value)  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.value) == ("sparse", value)


def test_the_flag_of_earlier_files_is_read_where_it_is_clear() -> None:
    assert LayerSpec.from_dict({**SIZES, "sparse": False}).sparse is None
    with pytest.raises(SpecError, match="SparseSpec"):
        LayerSpec.from_dict({**SIZES, "sparse": True})


@pytest.mark.parametrize(
    "data", [{"kind": "token_topk"}, {"topk": 8}, {"kind": "token_topk", "topk": 8, "top_p": 1}]
)
def test_json_of_it_names_its_fields(data: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="must name kind and topk"):
        LayerSpec.from_dict({**SIZES, "sparse": data})


def test_json_may_leave_out_the_block_of_single_keys() -> None:
    data = {**SIZES, "sparse": {"kind": "token_topk", "topk": 8}}
    assert LayerSpec.from_dict(data).sparse == SparseSpec("token_topk", 8)


def test_its_words_name_kind_and_numbers() -> None:
    assert (str(TOKENS), str(BLOCKS)) == ("token_topk 2048", "block 16 of 64 tokens")
