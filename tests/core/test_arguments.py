"""The checks of arguments: values in their plain types, and errors that name argument, value and limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attnplug.core import ContextParallel, LayerSpec
from attnplug.core.arguments import (
    at_least,
    checked,
    flag,
    integer,
    integers,
    listed,
    mapping_of,
    number,
    one_of,
    positive,
    rank_group,
    sequence_of,
    subclass_of,
    torch_device,
    unusual_form,
)
from attnplug.core.batch import compute_slot_mapping
from attnplug.core.batch.slots import _on_device
from attnplug.errors import BatchError, LayoutError, SpecError

SPEC = LayerSpec(num_heads=2, num_kv_heads=1, head_size=8, dtype="float32")


class Group:
    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def said(call: Any, *arguments: Any, error: type[Exception] = BatchError, **named: Any) -> str:
    with pytest.raises(error) as caught:
        call(*arguments, **named)
    return str(caught.value)


def test_values_are_given_in_their_plain_types() -> None:
    for given, plain in (
        (integer("n", np.int64(3)), 3),
        (integer("n", torch.tensor(3)), 3),
        (positive("s", np.float32(0.5)), 0.5),
    ):
        assert (given, type(given)) == (plain, type(plain))
    assert integers("n", np.array([1, 2])) == [1, 2]
    assert integers("n", range(2)) == [0, 1]
    assert positive("scale", torch.tensor([2.0])) == 2.0
    assert flag("f", np.True_) is True
    assert number("n", np.float32(2)) == 2
    assert torch_device("device", "cpu") == torch.device("cpu")
    assert torch_device("device", "cuda:9", is_used=False) == torch.device("cuda:9")
    assert at_least(2)("n", np.int32(2)) == 2
    assert one_of(int, str)("x", "a") == "a"
    assert subclass_of(Exception)("x", BatchError) is BatchError
    assert sequence_of(at_least(0), "counts")("n", (1, np.int8(2))) == [1, 2]
    assert mapping_of(int)("m", {"a": 1}) == {"a": 1}
    group = Group()
    assert rank_group("group", group) is group


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: integer("n", True), "n=True must be an integer"),
        (lambda: integer("n", torch.tensor(True)), "n=tensor(True) must be an integer"),
        (lambda: integer("n", 1.0), "n=1.0 must be an integer"),
        (lambda: listed("n", "ab", "counts"), "n='ab' must be a sequence of counts"),
        (lambda: listed("n", {1: 2}, "counts"), "n={1: 2} must be a sequence of counts"),
        (lambda: listed("n", 3, "counts"), "n=3 must be a sequence of counts"),
        (lambda: at_least(2)("n", 1), "n=1 must be at least 2"),
        (lambda: at_least(2)("n", "2"), "n='2' must be an integer of at least 2"),
        (lambda: at_least(2)("n", 1 << 63), f"n={1 << 63} must be below {1 << 63}"),
        (lambda: one_of(int, str)("x", 1.5), "x=1.5 must be a int or a str"),
        (lambda: subclass_of(Exception)("x", int), "x=<class 'int'> must be a subclass of Exception"),
        (lambda: subclass_of(Exception)("x", Exception()), "x=Exception() must be a subclass of Exception"),
        (lambda: sequence_of(at_least(0), "counts")("n", [1, -1]), "n[1]=-1 must be at least 0"),
        (lambda: positive("s", "1"), "s='1' must be a finite number above 0"),
        (lambda: positive("s", True), "s=True must be a finite number above 0"),
        (lambda: positive("s", float("inf")), "s=inf must be a finite number above 0"),
        (lambda: positive("s", torch.ones(2)), "s='(2,) on cpu' must be a number"),
        (lambda: positive("s", torch.ones(1, device="meta")), "s='(1,) on meta' must be a number"),
        (lambda: number("n", True), "n=True must be a number"),
        (lambda: number("n", "1"), "n='1' must be a number"),
        (lambda: flag("f", 1), "f=1 must be True or False"),
        (lambda: rank_group("g", 3), "g=3 must be a process group, with size() and rank()"),
        (
            lambda: torch_device("d", 0),
            "d=0 is not a device that torch can use here: a number would be the index of a GPU",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(call: Any, text: str) -> None:
    assert said(call) == text


def test_a_class_of_groups_is_no_group() -> None:
    assert said(rank_group, "g", Group).endswith("must be a process group, with size() and rank()")


def test_mappings_have_names_as_keys_and_errors_name_the_key() -> None:
    check = mapping_of(at_least(1), SpecError)
    assert said(check, "m", [1], error=SpecError) == "m=[1] must be a mapping of layer names"
    assert said(check, "m", {1: 1}, error=SpecError) == "m=1 must have names as keys"
    assert said(check, "m", {"a": 0}) == "m['a']=0 must be at least 1"
    assert said(mapping_of(int), "m", {"a": "1"}, error=LayoutError) == "m['a']='1' must be a int"


def test_a_device_that_torch_cannot_use_is_told_in_one_line() -> None:
    assert "privateuseone" in said(torch_device, "d", torch.device("privateuseone:3"))
    text = said(torch_device, "d", torch.device("cuda:99"))
    assert text.startswith("d='cuda:99' is not a device that torch can use here: ")
    assert "\n" not in text
    assert said(lambda: torch_device("d", "nowhere", SpecError), error=SpecError).startswith(
        "d='nowhere' is not a device"
    )


def test_tensors_without_a_place_for_each_element_are_named() -> None:
    assert unusual_form(torch.zeros(2)) is None
    assert unusual_form(torch.zeros(2, 2).to_sparse()) == "torch.sparse_coo"
    nested = torch.nested.nested_tensor([torch.zeros(1, 4), torch.zeros(2, 4)], layout=torch.jagged)
    assert unusual_form(nested) == "nested"
    seen: list[str | None] = []

    def look(row: torch.Tensor) -> torch.Tensor:
        seen.append(unusual_form(row))
        return row

    torch.vmap(look)(torch.zeros(3, 2))
    assert seen == ["a tensor of a torch.func transform, such as vmap"]


@checked(
    query="T H _: floats",
    starts="R+1: int32 int64",
    out="?T *",
    table="R _: integers host",
    count=at_least(0),
    kind=str,
)
def call(
    query: Any, starts: Any, out: Any = None, table: Any = None, *, count: int | None = None, kind: str = "a"
) -> Any:
    return query, starts, out, table, count, kind


QUERY, STARTS = torch.zeros(3, 2, 8), torch.tensor([0, 1, 3])


def test_checked_arguments_fit_each_other_and_are_converted() -> None:
    assert call(QUERY, STARTS, count=np.int8(4))[4] == 4
    assert call(QUERY, STARTS, torch.zeros(3, 5, 6), torch.zeros(2, 9, dtype=torch.int64))[5] == "a"
    assert call(QUERY, starts=STARTS, count=None)[2:] == (None, None, None, "a")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"query": [1.0]}, "query=[1.0] must be a torch.Tensor"),
        ({"query": torch.zeros(3, 2)}, "query=(3, 2) must have the shape (T, H, _)"),
        ({"query": QUERY.to_sparse()}, "query.layout='torch.sparse_coo' must be torch.strided"),
        ({"starts": STARTS.float()}, "starts.dtype=torch.float32 must be torch.int32, torch.int64"),
        ({"starts": STARTS[:0]}, "starts=(0,) must have the shape (R+1,)"),
        ({"starts": STARTS.to("meta")}, "starts.device='meta' must be cpu, that of query"),
        ({"out": torch.zeros(4, 5)}, "out=(4, 5) must have the shape (3, ...) beside query"),
        ({"table": torch.zeros(3, 1).int()}, "table=(3, 1) must have the shape (2, _) beside starts"),
        ({"table": torch.zeros(2, 1, device="meta").int()}, "table.device='meta' must be on the host"),
        ({"count": -1}, "count=-1 must be at least 0"),
        ({"kind": 3}, "kind=3 must be a str"),
    ],
)
def test_a_tensor_that_does_not_fit_is_told_beside_the_one_it_should_fit(
    given: dict[str, Any], text: str
) -> None:
    assert said(call, **{"query": QUERY, "starts": STARTS, **given}) == text


def test_python_itself_names_an_argument_that_is_given_twice_or_is_one_too_many() -> None:
    assert "multiple values for argument 'query'" in said(call, QUERY, STARTS, query=QUERY, error=TypeError)
    assert "positional arguments but 5 were given" in said(
        call, QUERY, STARTS, None, None, 1, error=TypeError
    )
    assert "missing 1 required positional argument: 'starts'" in said(call, QUERY, error=TypeError)


class TestSlots:
    """Slots of tensors, on a host and on a device."""

    TABLE, NONE, NEW = torch.tensor([[5, 6]]), torch.tensor([0]), torch.tensor([3])

    def test_blocks_past_64_bits_are_refused(self) -> None:
        most, four = (1 << 63) - 1, ContextParallel(4, 0)
        text = said(compute_slot_mapping, self.TABLE, self.NONE, self.NEW, 1 << 62, context_parallel=four)
        assert text == f"block_size={1 << 62} times the ranks that share a block must be at most {most}"
        text = said(compute_slot_mapping, self.TABLE, self.NONE, self.NEW, 1 << 62)
        assert (
            text == f"block_table=5 must be at most 0: slots of blocks of {1 << 62} tokens would pass {most}"
        )

    def test_kinds_of_tensors_are_those_of_the_others(self) -> None:
        text = said(compute_slot_mapping, self.TABLE, self.NONE.float(), self.NEW, 4)
        assert "must be a strided tensor of an integer type" in text
        text = said(compute_slot_mapping, self.TABLE.to("meta"), self.NONE, self.NEW, 4)
        assert text == "block_table.device='meta' must be cpu, that of num_new_tokens"

    def test_a_block_below_0_is_named_with_its_position(self) -> None:
        text = said(compute_slot_mapping, torch.tensor([[5, -3]]).numpy(), np.array([2]), np.array([4]), 4)
        assert text == "block_table=-3 is the block of position 4 of request 0; least is 0"

    def test_on_a_device_the_number_of_slots_and_the_output_are_checked_without_a_wait(self) -> None:
        given = 4, 3, self.TABLE, self.NONE, self.NEW, None
        assert _on_device(*given, None).tolist() == [20, 21, 22]
        out = torch.zeros(5, dtype=torch.int64)
        assert _on_device(*given, out).tolist() == [20, 21, 22]
        assert out.tolist() == [20, 21, 22, 0, 0]
        assert (
            said(_on_device, *given, out.int())
            == "out='torch.int32 (5,)' must be int64 with at least 3 elements"
        )
        assert (
            said(_on_device, *given, out[:2])
            == "out='torch.int64 (2,)' must be int64 with at least 3 elements"
        )
        assert said(_on_device, *given, torch.zeros(1, dtype=torch.int64).expand(4)).startswith(
            "out='strides (0,)' "
        )
        assert said(_on_device, 4, None, *given[2:], None) == (
            "num_tokens=None is required on a device: counting would wait for it"
        )


@pytest.mark.parametrize(
    ("spec", "step", "text"),
    [
        (SPEC, "no", "causal='no' must be a bool, or None: as the layers say"),
        (
            SPEC,
            False,
            "causal=False cannot widen a causal layer; leave causal=None: each layer is then as its own spec says",
        ),
        (
            SPEC.replace(attn_type="encoder", causal=False),
            True,
            "causal=True cannot narrow a layer of attn_type=encoder; leave causal=None: each layer is then as its own spec says",
        ),
    ],
)
def test_a_batch_narrows_decoders_alone(spec: LayerSpec, step: Any, text: str) -> None:
    assert said(spec.causal_in, step) == text
    wide = SPEC.replace(causal=False)
    assert [wide.causal_in(each) for each in (None, False, True)] == [False, False, True]
    assert [SPEC.causal_in(each) for each in (None, True)] == [True, True]
