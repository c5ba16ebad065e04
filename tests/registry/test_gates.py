"""The gates: what each says of a candidate, and that whatever a backend raises is a reason against it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from fake_plugins import CPU, H100, SPEC, backend, raises, registry

from attnplug import AttentionBackend, Reason, Registry
from attnplug.backends.torch_native import TorchBackend
from attnplug.errors import BackendUnavailableError, NoBackendError, PluginError
from attnplug.registry import Candidate, Gate


class Panic(BaseException):
    """As a Rust extension raises it: no Exception."""


def judged(made: type[AttentionBackend], **asked: Any) -> Candidate:
    """What becomes of `made`, beside a backend that serves."""
    decision = registry(made, backend("SOUND", 1)).explain(SPEC, **{"device": CPU, **asked})
    (one,) = [each for each in decision.candidates if each.name == made.get_name()]
    if not one.accepted:
        assert decision.backend == "SOUND"
    return one


def test_reasons_stand_in_the_order_of_the_gates_and_all_of_them_do() -> None:
    made = backend(
        "ODD", 1000, requires=("no-such-thing>=1",), device_types=("cuda",), supported_dtypes=("float16",)
    )
    one = judged(made)
    assert one.codes == ("dtype", "device_type", "plugin_error", "not_installed")
    assert (one.refused_at, one.priority) == (Gate.INSTALLED, None)
    assert judged(made, assume_installed="all").refused_at is Gate.CONFIGURATION


@pytest.mark.parametrize("error", [RuntimeError("no licence"), SystemExit("no licence"), Panic("no licence")])
def test_a_validation_that_raises_is_a_reason(error: BaseException) -> None:
    one = judged(backend("ODD", validate_configuration=raises(error)))
    assert one.codes == ("plugin_error",)
    assert one.reasons[0].endswith(
        f"ODD raised {type(error).__name__}: no licence in validate_configuration; tell its author"
    )


def test_an_interrupt_of_the_user_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        judged(backend("ODD", validate_configuration=raises(KeyboardInterrupt())))


def test_an_error_whose_message_raises_is_described_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    one = judged(backend("ODD", validate_configuration=raises(Mute())))
    assert "raised Mute: its message cannot be read in validate_configuration" in one.reasons[0]
    one = judged(backend("ODD", validate_configuration=raises(ValueError())))
    assert "raised ValueError in validate_configuration" in one.reasons[0]


@pytest.mark.parametrize("found", ["no", "", None, 3, {"no"}])
def test_a_validation_that_returns_no_list_is_one_reason(found: object) -> None:
    one = judged(backend("ODD", validate_configuration=lambda *asked: found))
    assert one.codes == ("plugin_error",)
    assert (
        f"returned {found!r} from validate_configuration, which must be a list of reasons" in one.reasons[0]
    )


def test_plain_sentences_are_taken_as_reasons() -> None:
    mixed = ["head_size not supported", Reason("nor this", code="dtype"), 3]
    one = judged(backend("PORTED", validate_configuration=lambda *asked: mixed))
    assert one.reasons == ("head_size not supported", "nor this", "3")
    assert one.codes == ("combination", "dtype", "combination")


@pytest.mark.parametrize("priority", [0, -1, 1000, 5.0, "50", True, None])
def test_a_priority_out_of_its_range_is_a_reason(priority: object) -> None:
    one = judged(backend("ODD", priority))
    assert (one.codes, one.priority) == (("plugin_error",), None)
    words = one.reasons[0]
    assert f"priority {priority!r}" in words or f"returned {priority!r} from get_priority" in words
    assert "must be an integer from 1 to 999" in words


@pytest.mark.parametrize("priority", [1, 999])
def test_the_ends_of_the_range_are_in_it(priority: int) -> None:
    assert judged(backend("FINE", priority)).priority == priority


def test_a_priority_that_raises_is_a_reason() -> None:
    one = judged(backend("ODD", get_priority=raises(ZeroDivisionError("by zero"))))
    assert "raised ZeroDivisionError: by zero in get_priority" in one.reasons[0]


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"get_preferred_block_size": raises(RuntimeError("?"))}, "raised RuntimeError: ? in get_preferred_block_size"),
        ({"supported_kv_cache_layouts": lambda: ()}, "returned () from supported_kv_cache_layouts"),
        ({"supported_kv_cache_layouts": lambda: ("XYZ",)}, "returned ('XYZ',) from supported_kv_cache_layouts"),
        *(
            (
                {"get_preferred_block_size": lambda *asked, size=size: size},
                f"returned {size!r} from get_preferred_block_size, which must be an integer",
            )
            for size in (-16, "16", True, 16.0, 2**70 * 1.0)
        ),
        ({"get_supported_kernel_block_sizes": lambda *asked: ()}, "must name at least one size"),
        ({"Options": int}, "has Options that cannot be made: PluginError: the Options of ODD cannot be read"),
    ],
)  # fmt: skip
def test_a_declaration_that_cannot_be_used_is_a_reason(attributes: dict[str, Any], words: str) -> None:
    one = judged(backend("ODD", **attributes))
    assert one.codes == ("plugin_error",)
    assert words in one.reasons[0]


@pytest.mark.parametrize("requires", [("x" * 10**7,), ("x",) * 101, (("x",) * 101,)])
def test_requirements_without_a_limit_are_refused_at_admission(requires: object) -> None:
    with pytest.raises(PluginError, match="more than 100 requirements, or one of more than 500 characters"):
        registry(backend("ODD", requires=requires))


def test_a_class_with_an_endless_name_is_named_in_short() -> None:
    bad = backend("ODD", get_priority=raises(ZeroDivisionError("by zero")))
    bad.__qualname__ = "x" * 10**7
    assert len(judged(bad).reasons[0]) < 400


@pytest.mark.parametrize(
    ("requires", "words"),
    [
        ((">= 1",), "InvalidRequirement"),
        (7, "TypeError"),
        ((("a", 3),), "TypeError"),
        (itertools.repeat("x"), "TypeError"),
    ],
)
def test_requirements_that_cannot_be_read_are_refused_at_admission(requires: object, words: str) -> None:
    with pytest.raises(PluginError, match=f"whose requires cannot be read: {words}"):
        registry(backend("ODD", requires=requires))


def test_ties_are_broken_by_name_and_the_rest_by_priority() -> None:
    found = registry(backend("B", 60), backend("A", 60), backend("C", 70), backend("D", 80, device_types=()))
    names = [candidate.name for candidate in found.explain(SPEC, CPU).candidates]
    assert names == ["C", "A", "B", "D"]


def test_a_door_that_raises_passes_the_layer_on_but_not_where_it_is_asked_for() -> None:
    opened = []

    def door() -> type[Any]:
        opened.append("get_impl_cls")
        raise ImportError("cannot import name 'flash_attn_varlen_func'")

    found = registry(backend("FIRST", 90, get_impl_cls=door), backend("SECOND"))
    decision = found.select(SPEC, CPU)
    assert (decision.backend, decision.level) == ("SECOND", "usable")
    (refused,) = decision.refused
    assert (refused.name, refused.refused_at, refused.codes) == ("FIRST", Gate.IMPORT, ("import_failed",))
    assert refused.priority == 90
    with pytest.raises(BackendUnavailableError) as error:
        found.select(SPEC, CPU, backend="FIRST")
    (reason,) = error.value.reasons
    assert reason == (
        "FIRST cannot be imported here: get_impl_cls raised ImportError: cannot import name "
        "'flash_attn_varlen_func'; attnplug doctor FIRST shows more"
    )
    found.select(SPEC.replace(head_size=128), CPU)
    assert opened == ["get_impl_cls"]


def test_both_doors_are_opened_once_and_only_down_to_the_first_that_works() -> None:
    opened: list[str] = []

    def made(name: str, priority: int) -> type[AttentionBackend]:
        def impl() -> type[Any]:
            opened.append(f"{name} impl")
            return TorchBackend.get_impl_cls()

        def builder() -> type[Any]:
            opened.append(f"{name} builder")
            return TorchBackend.get_builder_cls()

        return backend(name, priority, get_impl_cls=impl, get_builder_cls=builder)

    found = registry(made("FIRST", 90), made("SECOND", 80))
    for size in (64, 128, 256):
        assert found.select(SPEC.replace(head_size=size), CPU).backend == "FIRST"
    assert opened == ["FIRST impl", "FIRST builder"]


@pytest.mark.parametrize("part", [None, "FlashImpl", 3])
def test_a_door_behind_which_there_is_no_class_is_shut(part: object) -> None:
    found = registry(backend("FIRST", get_builder_cls=lambda: part))
    with pytest.raises(NoBackendError, match=f"get_builder_cls returned {part!r}, which is not a class"):
        found.select(SPEC, CPU)


def test_no_door_is_opened_for_a_question() -> None:
    closed = backend("CLOSED", get_impl_cls=raises(AssertionError("a door was opened")))
    found = registry(closed)
    asked = [
        found.explain(SPEC, CPU),
        found.select(SPEC, CPU, assume_installed="all"),
        found.select(SPEC, CPU, assume_installed={}),
    ]
    assert [decision.level for decision in asked] == ["declared"] * 3
    assert [decision.backend for decision in asked] == ["CLOSED"] * 3
    with pytest.raises(NoBackendError, match="get_impl_cls raised AssertionError"):
        found.select(SPEC, CPU)


def test_no_door_is_opened_for_a_device_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug.core.device.Device.current", classmethod(lambda cls: CPU))
    found = registry(backend("CLOSED", get_impl_cls=raises(AssertionError("a door was opened"))))
    assert found.select(SPEC, H100).level == "declared"


def test_a_device_of_this_machine_has_its_doors_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug.core.device.Device.current", classmethod(lambda cls: H100))
    assert registry(backend("OPEN")).select(SPEC, H100).level == "usable"


def test_no_backend_at_all_says_so() -> None:
    with pytest.raises(
        NoBackendError, match="no backend serves this layer on cpu\n  no backend is installed"
    ):
        Registry([]).select(SPEC, CPU)


def test_no_backend_lists_every_candidate_with_its_reasons() -> None:
    found = registry(backend("A", device_types=("cuda",)), backend("B", supported_dtypes=("float16",)))
    with pytest.raises(NoBackendError) as error:
        found.select(SPEC, CPU, "decode", layer_name="model.0")
    assert str(error.value) == (
        "no backend serves layer model.0 on cpu in decode\n"
        "  B: dtype not supported: bfloat16 is not float16\n"
        "  A: device type not supported: cpu is not cuda"
    )
