"""A plugin's class is read when the plugin is registered: what it declares is checked then, and copied."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from fake_plugins import CPU, SPEC, Serves, backend, plugin, registry

from attnplug import AttentionBackend, Feature, Registry, hookimpl
from attnplug._system.text import shortened
from attnplug.core.interface.guarded import describe, plain_list
from attnplug.errors import PluginError
from attnplug.registry.plugins.discovery import Host
from attnplug.registry.plugins.installed import library_versions
from attnplug.registry.plugins.records import PluginRecord, PluginStatus

pytestmark = pytest.mark.attack("read once")

FIELDS = (
    *(
        "family",
        "requires",
        "device_types",
        "supported_dtypes",
        "supported_kv_cache_dtypes",
        "supported_phases",
    ),
    *("features", "supported_sparse_kinds", "serves_dense", "step_safe", "Options", "accept_output_buffer"),
)


def refusal(*backends: Any, **attributes: Any) -> str:
    """Why a plugin with these classes does not load; others are not touched."""
    record = PluginRecord("acme:bad", "acme", "1", PluginStatus.BLOCKED)
    found = Host().check_and_load(record, plugin(*backends, **attributes)).record
    assert found.status in (PluginStatus.BROKEN, PluginStatus.CONFLICT), found
    assert found.reason is not None
    assert len(found.reason) < 5000
    return found.reason


@pytest.mark.parametrize("field", FIELDS)
def test_a_property_of_the_metaclass_is_never_read(field: str) -> None:
    read: list[int] = []

    def once(cls: type) -> Any:
        read.append(1)
        raise SystemExit(0)

    meta = type("Meta", (type(Serves),), {field: property(once)})
    assert f"metaclass defines {field}; write it on the class" in refusal(meta("BAD", (backend("BAD"),), {}))
    assert read == []


@pytest.mark.parametrize(
    "name",
    ["__getattribute__", "__getattr__", "__instancecheck__", "__subclasscheck__", "__bool__", "__name__"],
)
def test_a_metaclass_does_not_answer_for_its_class(name: str) -> None:
    is_asked = False

    def answer(cls: type, *asked: Any) -> Any:
        if is_asked:
            raise SystemExit(0)
        return (
            super(meta, cls).__getattribute__(*asked) if name == "__getattribute__" else asked[0] is not None
        )

    value: Any = property(lambda cls: answer(cls, cls)) if name == "__name__" else answer
    meta: Any = type("Meta", (type(Serves),), {name: value})
    bad = meta("BAD", (Serves,), {"get_name": staticmethod(lambda: "BAD")})
    is_asked = True
    assert "metaclass defines" in refusal(bad)


class Once:
    """A descriptor that gives a value the first time, and raises from then on."""

    def __init__(self, value: object) -> None:
        self.values = iter([value])

    def __get__(self, instance: object, owner: object) -> object:
        for value in self.values:
            return value
        raise GeneratorExit


@pytest.mark.parametrize("field", FIELDS)
def test_a_declaration_is_no_code(field: str) -> None:
    value = getattr(Serves, field)
    for code in (Once(value), property(lambda self: value), lambda: value, classmethod(lambda cls: value)):
        bad = type("BAD", (backend("BAD"),), {field: code})
        assert f"BAD.{field} is a method; attnplug reads a class attribute" in refusal(bad)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("serves_dense", value) for value in ("no", 0, None, (False,))),
        *(("step_safe", value) for value in ("yes", 1, [True])),
        *(("features", value) for value in (0, 8, "SINKS", None, {Feature.SINKS})),
        *(("Options", value) for value in (5, "Options", {}, ())),
        *(
            ("supported_sparse_kinds", value)
            for value in ("token_topk", 5, (5,), itertools.repeat("token_topk"))
        ),
        *(("requires", value) for value in (5, ((5,),), itertools.repeat("x"), {"a": "b"}, object())),
        *(("supported_phases", value) for value in ("decode", ("decodes",), 5, itertools.cycle(["decode"]))),
        *(("device_types", value) for value in ("cpu", ("CPU ",), (b"cpu",), itertools.repeat("cpu"))),
        ("depends_on_capability", "yes"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_declaration_of_another_type_is_refused(field: str, value: Any) -> None:
    bad = backend("BAD")
    setattr(bad, field, value)
    assert field in refusal(bad)


class Text(str):
    """Text that says of itself what it likes."""

    __slots__ = ()

    def upper(self) -> str:
        return "HARMLESS"

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


NAMES = [
    *(
        "TRITON ",
        " TRITON",
        "\u0422RITON",
        "TORCH+TRITON",
        "TRIT\u200bON",
        "TORCH\n",
        "TORCH@acme",
        "A,B",
        "A=B",
        "",
    ),
    *(
        "A" * 101,
        "8BIT",
        "\uff34ORCH",
        "TORCH\u0301",
        "\x1b[2J",
        Text("TORCH"),
        Text("MINE"),
        5,
        None,
        b"MINE",
    ),
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_name_is_plain_text_under_one_rule(name: Any) -> None:
    assert "a name has letters, digits and _ . -" in refusal(backend("BAD", get_name=lambda: name))


@pytest.mark.parametrize("name", [name for name in NAMES if name is not None], ids=repr)
def test_a_family_is_plain_text_under_the_same_rule(name: Any) -> None:
    assert "a name has letters, digits and _ . -" in refusal(backend("BAD", family=name))


@pytest.mark.parametrize("name", ["torch", "Triton", "FLASH_ATTN", "flashinfer"])
def test_a_reserved_family_is_refused_in_any_case(name: str) -> None:
    assert "a name reserved for attnplug's own backend" in refusal(backend("BAD", family=name))


@pytest.mark.parametrize("module", [5, None, Text("acme")])
def test_the_module_of_a_class_is_text(module: Any) -> None:
    assert "__module__" in refusal(backend("BAD", __module__=module))


def test_a_class_cannot_pass_for_the_interface() -> None:
    bad = backend("BAD", __module__="attnplug.core.backend", supports_sliding_window=True)
    assert "says that it is of attnplug.core.backend, where it is not" in refusal(bad)


class Offers(list):  # type: ignore[type-arg]
    """A list whose iteration never ends."""

    def __iter__(self) -> Any:
        return itertools.repeat(backend("A"))


@pytest.mark.parametrize(
    "offered", [itertools.repeat(1), Offers(), {"A": 1}, (x for x in ()), "A", 5, [object()]]
)
def test_offers_are_a_plain_sequence(offered: Any) -> None:
    words = refusal(attnplug_backends=hookimpl(lambda: offered))
    assert "from attnplug_backends; it must be a sequence" in words or "not a subclass" in words


class Proxy:
    """An object that says it is a class."""

    __class__ = type  # type: ignore[assignment]
    __mro__ = (AttentionBackend, object)


def test_an_object_that_calls_itself_a_class_is_none() -> None:
    assert "which is not a subclass of AttentionBackend" in refusal(Proxy())


def test_a_class_that_was_only_registered_as_a_subclass_is_none() -> None:
    class Virtual:
        pass

    AttentionBackend.register(Virtual)
    assert "which is not a subclass of AttentionBackend" in refusal(Virtual)


def test_thousands_of_faults_are_told_in_short() -> None:
    bad = backend("BAD", **{f"supports_{number}": True for number in range(5_000)})
    assert "is not read by attnplug" in refusal(bad)


def test_what_a_class_declares_later_changes_no_answer_of_the_registry() -> None:
    types, needs = ["cpu"], ["packaging>=20"]
    late = backend("LATE", 900, family="LATES", device_types=types, requires=needs)
    found = registry(late, backend("GOOD", 10))
    (offer,) = found.plugins.find("LATE")
    types.append("cuda")
    needs[0] = "no such ! name"
    late.family = "TRITON"
    late.step_safe = "yes"  # type: ignore[assignment]
    assert offer.declared.device_types == ("cpu",)
    assert offer.declared.requires == ("packaging>=20",)
    assert "packaging" in library_versions(offer)
    assert [each.name for each in found.plugins.find("LATES")] == ["LATE"]
    assert found.plugins.find("TRITON") == ()
    assert found.plugins.names == ["GOOD", "LATE", "LATES"]
    assert found.explain(SPEC, CPU).backend == "LATE"


@pytest.mark.parametrize("field", ["supported_phases", "device_types", "supported_dtypes", "features"])
@pytest.mark.parametrize("value", [itertools.count(), None, 5])
def test_what_a_class_declares_later_in_another_type_is_a_fault(field: str, value: Any) -> None:
    late = backend("LATE", 900)
    found = registry(late, backend("GOOD", 10))
    setattr(late, field, value)
    decision = found.explain(SPEC, CPU)
    assert decision.backend == "GOOD"
    (bad,) = [each for each in decision.candidates if each.name == "LATE"]
    assert bad.codes == ("plugin_error",)
    assert field in bad.reasons[0]


def test_a_class_that_is_registered_again_is_read_again() -> None:
    late = backend("LATE", 900, family="ONE")
    assert registry(late).plugins.names == ["LATE", "ONE"]
    late.family = "TWO"
    assert registry(late).plugins.names == ["LATE", "TWO"]


def test_options_that_raise_the_second_time_pass_the_layer_on() -> None:
    made: list[int] = []

    @dataclasses.dataclass(frozen=True)
    class Options:
        size: int = 1

        def __post_init__(self) -> None:
            made.append(1)
            if len(made) > 1:
                raise SystemExit(0)

    found = registry(backend("BAD", 900, Options=Options), backend("GOOD", 10))
    assert found.explain(SPEC, CPU).backend == "GOOD"
    assert found.select(SPEC.replace(num_heads=8), CPU).backend == "GOOD"


class Unlike(type):
    """A metaclass of Options that raises wherever it is asked."""

    def __instancecheck__(cls, instance: object) -> bool:
        raise SystemExit(0)

    def __getattr__(cls, name: str) -> Any:
        # Python's own abc asks for this when a class is made.
        raise AttributeError(name) if name == "__isabstractmethod__" else SystemExit(0)


def test_a_metaclass_of_options_is_not_asked() -> None:
    found = registry(backend("BAD", 900, Options=Unlike("Options", (), {})), backend("GOOD", 10))
    assert found.explain(SPEC, CPU).backend == "GOOD"

    @dataclasses.dataclass(frozen=True)
    class Mine:
        size: int = 1

    both = registry(backend("BAD", 900, Options=Unlike("Options", (), {})), backend("GOOD", 10, Options=Mine))
    assert both.explain(SPEC, CPU, backend="GOOD", options=Mine(3)).options == (("size", 3),)


@pytest.mark.parametrize("name", [Text("x"), 5, None])
def test_a_plugin_object_with_a_strange_name_is_registered_under_a_plain_one(name: Any) -> None:
    module = plugin(backend("FINE"))
    module.__name__ = name
    record = Registry().register(module)
    assert type(record.name) is str


def test_a_composite_that_cannot_be_made_is_a_plugin_error() -> None:
    @dataclasses.dataclass(frozen=True)
    class Options:
        size: NoSuchName = 1  # type: ignore[name-defined]  # noqa: F821

    found = registry(backend("BAD", 900, Options=Options), backend("GOOD", 10))
    with pytest.raises(PluginError, match=r"BAD\+GOOD cannot be made: NameError"):
        found.explain(SPEC, CPU, backend="BAD+GOOD")
    assert found.explain(SPEC, CPU).backend == "GOOD"


def test_one_requirement_as_text_is_one_requirement_of_a_composite_too() -> None:
    found = registry(backend("ONE", requires="packaging>=20"), backend("OTHER"))
    (both,) = found.plugins.find("ONE+OTHER")
    assert both.declared.requires == ("packaging>=20",)


def test_plain_copies_run_no_code_of_a_subclass() -> None:
    assert plain_list(Offers([1, 2])) == [1, 2]
    with pytest.raises(TypeError, match="more than 10 entries"):
        plain_list(range(11), 10)
    for value in (itertools.count(), iter(()), "ab", b"ab", {1: 2}, None):
        with pytest.raises(TypeError, match="not a sequence"):
            plain_list(value)


def test_a_long_text_tells_its_length() -> None:
    assert shortened("x" * 5_000) == "x" * 960 + "... (5,000 characters)"
    assert len(describe(ValueError("x" * 10**6))) < 1100
