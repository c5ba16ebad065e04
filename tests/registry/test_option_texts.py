"""Options as text: in ATTNPLUG_OPTIONS and after --option."""

from __future__ import annotations

import pytest

import attnplug
from attnplug import LayerSpec
from attnplug.errors import PolicyError
from attnplug.registry.plugins.options import parse_options, split_options

SPEC = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64)
HERE = {"assume_installed": "all"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("4", 4), ("0.5", 0.5), ("true", True), ("null", None), ("[1, 2]", (1, 2)), ("fa2", "fa2")],
        *[("", ""), ('"4"', "4"), ("True", "True"), ("a=b", "a=b"), ("[" * 100_000, "[" * 100_000)],
    ],
)
def test_a_value_is_json_or_text(text: str, value: object) -> None:
    found = parse_options([f"ACME.x={text}"], "--option", None)
    assert found == {"ACME": {"x": value}}
    assert type(found["ACME"]["x"]) is type(value)


def test_the_backend_is_named_or_the_one_asked_for() -> None:
    texts = ["a=1", "ACME.b=2", "acme@attnplug-acme.c=3"]
    assert parse_options(texts, "--option", "TORCH") == {
        "TORCH": {"a": 1},
        "ACME": {"b": 2},
        "acme@attnplug-acme": {"c": 3},
    }
    with pytest.raises(PolicyError, match=r"--option='a=1' names no backend.*; write NAME.a=1"):
        parse_options(texts, "--option", None)


@pytest.mark.parametrize("text", ["", "a", "=1", "ACME.=1", ".a=1", "ACME.not a name=1"])
def test_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(PolicyError, match=r"must be NAME\.option=value"):
        parse_options([text], "--option", "ACME")


def test_an_option_is_set_once() -> None:
    with pytest.raises(PolicyError, match=r"--option='ACME.a=2' sets ACME.a a second time"):
        parse_options(["a=1", "ACME.a=2"], "--option", "ACME")


def test_commas_inside_a_value_do_not_split_it() -> None:
    assert split_options("A.x=[1, 2], B.y=2,z=a,b") == ["A.x=[1, 2]", " B.y=2", "z=a,b"]
    assert split_options(" ") == []


def test_the_variable_is_read_at_each_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("fa2", "fa2"), ("fa3", "fa3")):
        monkeypatch.setenv("ATTNPLUG_OPTIONS", f"FLASHINFER.prefill_backend={value}")
        chosen = attnplug.explain(SPEC, "sm90", backend="FLASHINFER", **HERE)
        assert chosen.get_options().prefill_backend == expected


def test_arguments_and_blocks_replace_the_variable_for_their_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_OPTIONS", "FLASHINFER.prefill_backend=fa2,FLASHINFER.tensor_cores=false")
    with attnplug.use("FLASHINFER", options={"prefill_backend": "fa3"}):
        options = attnplug.explain(SPEC, "sm90", **HERE).get_options()
        assert (options.prefill_backend, options.tensor_cores) == ("fa3", True)
    given = attnplug.explain(SPEC, "sm90", backend="FLASHINFER", options={"tensor_cores": True}, **HERE)
    assert given.get_options().prefill_backend == "auto"


def test_the_variable_may_leave_out_the_one_backend_of_attnplug_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", "FLASHINFER")
    monkeypatch.setenv("ATTNPLUG_OPTIONS", "tensor_cores=false")
    assert attnplug.explain(SPEC, "sm90", **HERE).get_options().tensor_cores is False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NOPE.x=1", r"ATTNPLUG_OPTIONS='NOPE' is not a backend; there are: .*TORCH"),
        ("x=1", "ATTNPLUG_OPTIONS='x=1' names no backend"),
        ("FLASHINFER.x=1", r"options\['x'\]=1 is unknown: FLASHINFER has no such option"),
        ("FLASHINFER.tensor_cores=2", r"options\['tensor_cores'\]=2 must be bool"),
        ("TORCH.x=1", "TORCH has no options"),
    ],
)
def test_what_the_variable_cannot_mean_is_refused(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPLUG_OPTIONS", text)
    with pytest.raises(PolicyError, match=says):
        attnplug.explain(SPEC, "cpu")
