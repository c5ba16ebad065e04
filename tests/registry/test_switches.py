"""The environment variables that say which plugins may load and rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_plugins import CPU, SPEC

import attnplug
from attnplug import Registry
from attnplug.errors import PluginError, PolicyError
from attnplug.registry import PluginStatus
from attnplug.registry.plugins.switches import Switches, is_on

See = Callable[..., None]
ACME = "attnplug-acme-decode"


def statuses(registry: Registry) -> dict[str | None, PluginStatus]:
    return {record.distribution: record.status for record in registry.records}


def test_without_switches_everything_may_load() -> None:
    assert Switches.read({}) == Switches(allow=None, block=(), rank=(), strict=False)


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_allow_list_leaves_the_builtin_backends_alone(
    text: str, see_plugins: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_plugins(ACME)
    monkeypatch.setenv("ATTNPLUG_PLUGINS", text)
    registry = Registry()
    found = statuses(registry)
    assert found["attnplug"] is PluginStatus.LOADED
    assert {status for name, status in found.items() if name != "attnplug"} == {PluginStatus.BLOCKED}
    assert "TORCH" in registry.backends()
    assert "ACME_DECODE" not in registry.backends()


@pytest.mark.parametrize("name", ["acme-decode", ACME, "Attnplug.Acme_Decode", f"{ACME}:acme-decode"])
def test_lists_match_entry_points_and_distributions(
    name: str, see_plugins: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_plugins(ACME, "attnplug-acme-sm80")
    monkeypatch.setenv("ATTNPLUG_PLUGINS", name)
    allowed = statuses(Registry())
    assert (allowed[ACME], allowed["attnplug-acme-sm80"]) == ("loaded", "blocked")
    monkeypatch.setenv("ATTNPLUG_BLOCK_PLUGINS", name)
    assert statuses(Registry())[ACME] == "blocked"
    monkeypatch.delenv("ATTNPLUG_PLUGINS")
    blocked = statuses(Registry())
    assert (blocked[ACME], blocked["attnplug-acme-sm80"]) == ("blocked", "loaded")


def test_a_blocked_plugin_says_by_which_variable_and_is_a_refused_candidate(
    see_plugins: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_plugins(ACME)
    monkeypatch.setenv("ATTNPLUG_BLOCK_PLUGINS", "acme-decode")
    registry = Registry()
    (one,) = [c for c in registry.explain(SPEC, CPU).candidates if c.distribution == ACME]
    assert (one.codes, one.refused_at) == (("blocked",), "plugin")
    assert one.reasons == (f"{ACME}:acme-decode is left out by ATTNPLUG_BLOCK_PLUGINS",)
    with pytest.raises(PluginError, match=r"did not load: .* is left out by ATTNPLUG_BLOCK_PLUGINS"):
        registry.select(SPEC, CPU, backend="ACME_DECODE")


@pytest.mark.parametrize("variable", ["ATTNPLUG_PLUGINS", "ATTNPLUG_RANK"])
def test_a_list_that_brings_in_an_unknown_plugin_is_an_error(
    variable: str, see_plugins: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_plugins(ACME)
    monkeypatch.setenv(variable, "acme-decode,acme-encode")
    with pytest.raises(PolicyError, match=f"{variable}='acme-encode' names no installed plugin; .*{ACME}"):
        Registry()


def test_a_block_list_may_name_plugins_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BLOCK_PLUGINS", "acme-encode")
    assert "TORCH" in Registry().backends()


@pytest.mark.parametrize("variable", ["ATTNPLUG_PLUGINS", "ATTNPLUG_BLOCK_PLUGINS", "ATTNPLUG_RANK"])
def test_a_list_with_an_empty_part_is_an_error(variable: str) -> None:
    with pytest.raises(PolicyError, match=f"{variable}='a,,b' must be plugin names with commas between them"):
        Switches.read({variable: "a,,b"})


@pytest.mark.parametrize(
    ("text", "strict"),
    [
        *(("1", True), (" Yes ", True), ("on", True), ("true", True), ("01", True)),
        *(("0", False), ("", False), ("00", False), ("False", False), ("no", False), ("off\n", False)),
    ],
)
def test_strict_mode_is_a_yes_or_a_no(text: str, strict: bool) -> None:
    assert Switches.read({"ATTNPLUG_STRICT": text}).strict is strict


def test_one_function_reads_every_variable_that_is_on_or_off() -> None:
    page = (Path(attnplug.__file__).parents[1] / "docs" / "reference" / "environment.md").read_text()
    variables = re.findall(r"^\| `(ATTNPLUG_\w+)` \| 1 or 0 \|", page, re.MULTILINE)
    assert sorted(variables) == ["ATTNPLUG_DEBUG", "ATTNPLUG_STRICT"]
    for variable in variables:
        assert [is_on(variable, {variable: text}) for text in ("1", "YES", "0", "00", "off")] == [
            *(True, True, False, False, False)
        ]
        assert is_on(variable, {}) is False
        with pytest.raises(PolicyError, match=f"{variable}='2' must be 1 or 0"):
            is_on(variable, {variable: "2"})
    calls = [
        call
        for path in Path(attnplug.__file__).parent.rglob("*.py")
        for call in re.findall(r"\bis_on\(([A-Z]+)", path.read_text())
    ]
    assert set(calls) == {"DEBUG", "STRICT"}


def test_strict_mode_is_nothing_else() -> None:
    with pytest.raises(PolicyError, match="ATTNPLUG_STRICT='maybe' must be 1 or 0"):
        Switches.read({"ATTNPLUG_STRICT": "maybe"})


def test_an_invited_plugin_ranks_and_an_uninvited_one_says_that_it_does_not(
    see_plugins: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_plugins("attnplug-bad-ranks", "attnplug-bad-twin-a")
    uninvited = Registry()
    assert uninvited.explain(SPEC, CPU).backend == "TWIN"
    (record,) = [record for record in uninvited.records if record.distribution == "attnplug-bad-ranks"]
    assert str(record.reason).endswith("ATTNPLUG_RANK does not name it")
    monkeypatch.setenv("ATTNPLUG_RANK", "attnplug-bad-ranks")
    invited = Registry()
    assert invited.explain(SPEC, CPU).backend == "BAD_RANKS"
    assert all(record.reason is None for record in invited.records if record.distribution != "attnplug")
