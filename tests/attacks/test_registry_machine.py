"""Random plugins that come and go, good and hostile: a registry answers as a fresh one with the same plugins."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from fake_plugins import SPEC, backend, plugin, raises
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from attnplug import Decision, Registry
from attnplug.errors import AttnplugError, PluginError

pytestmark = pytest.mark.attack("declarations")


class Liar:
    """Nothing that it is asked has an answer."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def with_hook(hook: Callable[[], Any]) -> Any:
    """A plugin whose attnplug_backends is `hook`."""
    from attnplug import hookimpl

    made = plugin()
    made.attnplug_backends = hookimpl(hook, specname="attnplug_backends")  # type: ignore[attr-defined]
    return made


class Odd(str):
    """Text that is equal to nothing and cannot be hashed."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")


GOOD = {
    "one": plugin(backend("ONE", 71)),
    "two": plugin(backend("TWO", 62), backend("THREE", 53)),
    "low": plugin(backend("LOW", 4)),
    "ranks": plugin(backend("RANKED", 35), rank=lambda candidates: ["RANKED"]),
    "no_sliding": plugin(backend("DENSE", 94, validate_configuration=lambda *_, **__: ["never"])),
    "dear": plugin(backend("DEAR", lambda *_: 1)),
}
HOSTILE = {
    "object": object(),
    "none": None,
    "text": "plugin",
    "liar": Liar(),
    "interface": plugin(backend("A"), ATTNPLUG_API=(2, 2)),
    "interface of text": plugin(backend("A"), ATTNPLUG_API="1"),
    "reserved": plugin(backend("TRITON")),
    "taken": plugin(backend("BASE")),
    "name of none": plugin(backend("A", get_name=lambda: None)),
    "name that raises": plugin(backend("A", get_name=raises(SystemExit(0)))),
    "odd name": plugin(backend("A", get_name=lambda: Odd("A"))),
    "escapes": plugin(backend("\x1b[2J")),
    "priority of text": plugin(backend("P1", "high")),
    "priority of nan": plugin(backend("P2", float("nan"))),
    "huge priority": plugin(backend("P3", 10**400)),
    "priority that exits": plugin(backend("P4", get_priority=raises(SystemExit(3)))),
    "raises when asked": plugin(backend("R1", 999, validate_configuration=raises(RecursionError()))),
    "interrupts not": plugin(backend("R2", 998, supports_combination=raises(GeneratorExit()))),
    "odd reasons": plugin(backend("R3", 997, validate_configuration=lambda *_, **__: [None, 3])),
    "reasons without end": plugin(backend("R4", 996, validate_configuration=lambda *_, **__: "x" * 10**6)),
    "hook that raises": with_hook(raises(RuntimeError("no"))),
    "hook that exits": with_hook(raises(SystemExit(0))),
    "hook that gives none": with_hook(lambda: None),
    "hook that gives itself": with_hook(lambda: [Liar]),
    "hook that gives twice": with_hook(lambda: [backend("TWICE"), backend("TWICE")]),
    "rank that raises": plugin(backend("K1", 21), rank=lambda candidates: 1 / 0),
    "rank that lies": plugin(backend("K2", 22), rank=lambda candidates: ["NOBODY", Odd("K2"), None]),
}
PLUGINS = {**GOOD, **HOSTILE}
SPECS = [
    SPEC,
    SPEC.replace(sliding_window=128),
    SPEC.replace(has_sinks=True),
    SPEC.replace(attn_type="encoder", direct_kv=True),
    SPEC.replace(kv_cache_dtype="fp8"),
    SPEC.replace(dtype="float16", logits_soft_cap=30.0, block_size=16),
]
RULES: list[Any] = [None, None, "ONE", "TWO,decode=THREE", "sliding=LOW", "NOBODY", "ONE@fakes", "A+B", "", 7,
                    {"*": "TWO"}, {"x": None}, [1], "R1", "P2", "\x1b[2J", "BASE"]  # fmt: skip
ENV = [
    {},
    {},
    {"ATTNPLUG_BACKEND": "TWO"},
    {"ATTNPLUG_BACKEND": "decode=NOBODY"},
    {"ATTNPLUG_BACKEND": "\udc80,"},
    {"ATTNPLUG_RANK": "ranks"},
    {"ATTNPLUG_STRICT": "1"},
    {"ATTNPLUG_BLOCK_PLUGINS": "one"},
]


def answer(ask: Callable[[], Decision]) -> str:
    """A decision that survives JSON, or a documented error, as text that is safe to print."""
    try:
        made = ask()
    except AttnplugError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        assert Decision.from_json(made.to_json()) == made
        text = f"{made.to_json()}\n{made.explanation()}"
    assert "\x1b" not in text
    return text


class RegistryMachine(RuleBasedStateMachine):
    """The plugins registered now, in order, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.base = plugin(backend("BASE", 50))
        self.found = Registry({"base": self.base})
        self.registered: dict[str, Any] = {}

    @rule(name=st.sampled_from([*GOOD, *PLUGINS]), kept=st.sampled_from(["mine", "other", None]))
    def register(self, name: str, kept: str | None) -> None:
        given = PLUGINS[name]
        before = self.found.records
        record = None
        with contextlib.suppress(PluginError):
            record = self.found.register(given, kept or name)
        if record is None:
            # One object cannot have two names, nor can two plugins offer one backend.
            assert name in HOSTILE or any(given is held for held in self.registered.values())
            assert self.found.records == before
            return
        assert record in self.found.records
        # A plugin that replaces another comes last.
        self.registered.pop(record.name, None)
        self.registered[record.name] = given

    @rule(name=st.sampled_from([*PLUGINS, "mine", "other", "nobody", ""]))
    def unregister(self, name: str) -> None:
        before = self.found.records
        if name not in self.registered:
            with pytest.raises(PluginError):
                self.found.unregister(name)
            assert self.found.records == before
            return
        assert self.found.unregister(name).name == name
        del self.registered[name]

    @rule(
        spec=st.sampled_from(SPECS),
        device=st.sampled_from(["cpu", "sm90", "sm80", None, "nowhere", 3]),
        phase=st.sampled_from([None, None, "decode", "prefill", "mixed"]),
        layer=st.sampled_from([None, "model.0"]),
        rule=st.integers(0, len(RULES) - 1),
        env=st.sampled_from(ENV),
        options=st.sampled_from([None, None, {}, {"ONE": {"x": 1}}, {"x": 1}, 5]),
        assumed=st.sampled_from([None, "all", {"x": "y"}, 3]),
    )
    def ask(
        self, spec: Any, device: Any, phase: Any, layer: Any, rule: int, env: Any, options: Any, assumed: Any
    ) -> None:
        given = {"backend": RULES[rule], "options": options, "assume_installed": assumed}
        with mock.patch.dict(os.environ, env):
            fresh = self.fresh()
            for call in ("select", "explain", "select"):
                asked = (spec, device, phase)
                one, other = (
                    answer(functools.partial(getattr(made, call), *asked, layer_name=layer, **given))
                    for made in (self.found, fresh)
                )
                assert one == other

    def fresh(self) -> Registry:
        made = Registry({"base": self.base})
        for name, held in self.registered.items():
            made.register(held, name)
        return made

    @invariant()
    def a_question_that_was_asked_before_has_the_answer_of_now(self) -> None:
        one, other = (
            answer(functools.partial(made.explain, SPEC, "cpu")) for made in (self.found, self.fresh())
        )
        assert one == other


def test_a_registry_answers_as_a_fresh_one_whatever_came_and_went():
    run_state_machine_as_test(RegistryMachine, settings=settings(max_examples=25, stateful_step_count=20))


@pytest.mark.slow
@pytest.mark.rare
def test_a_registry_answers_as_a_fresh_one_for_longer():
    run_state_machine_as_test(RegistryMachine, settings=settings(max_examples=100, stateful_step_count=40))
