"""Two distributions that offer one name: neither is chosen by itself, each can be asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_plugins import CPU, SPEC, backend, plugin

from attnplug import Registry, use
from attnplug.core import Feature
from attnplug.errors import (
    BackendUnavailableError,
    NoBackendError,
    PluginError,
    PolicyError,
    UnknownBackendError,
)
from attnplug.registry import Gate, PluginStatus

pytestmark = pytest.mark.attack("names")

See = Callable[..., None]
A, B = "attnplug-bad-twin-a", "attnplug-bad-twin-b"


@pytest.fixture
def twins(see_plugins: See, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry of TORCH and of two plugins that offer TWIN."""
    see_plugins(A, B, "attnplug-bad-exit")
    monkeypatch.setenv("ATTNPLUG_PLUGINS", f"{A},{B},bad-exit")
    return Registry()


def test_neither_is_chosen_by_itself(twins: Registry) -> None:
    decision = twins.explain(SPEC, CPU)
    assert "TWIN" not in twins.backends()
    refused = {c.name: c for c in decision.refused if c.codes == ("conflict",)}
    assert set(refused) == {f"TWIN@{A}", f"TWIN@{B}"}
    assert {c.refused_at for c in refused.values()} == {Gate.PLUGIN}
    assert refused[f"TWIN@{A}"].reasons[0].remedy == f"ask for TWIN@{A} or TWIN@{B}"


def test_both_records_name_the_other(twins: Registry) -> None:
    records = {record.distribution: record for record in twins.records}
    for name, other in ((A, B), (B, A)):
        assert records[name].status is PluginStatus.CONFLICT
        assert f"and so does {other}:{other.removeprefix('attnplug-')}" in str(records[name].reason)
        assert str(records[name].reason).endswith(f"ask for TWIN@{name}")


def test_the_plain_name_is_an_error_that_names_both(twins: Registry) -> None:
    with pytest.raises(PluginError, match=f"TWIN is offered by .*; ask for TWIN@{A} or TWIN@{B}"):
        twins.select(SPEC, CPU, backend="TWIN")


@pytest.mark.parametrize("owner", [A, B, f"{B}:bad-twin-b", "Attnplug_Bad.Twin-A"])
def test_the_name_at_its_owner_picks_one(owner: str, twins: Registry) -> None:
    decision = twins.explain(SPEC, CPU, backend=f"TWIN@{owner}")
    assert decision.backend == "TWIN"
    assert decision.chosen is not None
    picked = str(decision.chosen.distribution)
    assert picked.endswith(owner.lower()[-1])
    other = A if picked == B else B
    assert [c.name for c in decision.refused if c.codes == ("conflict",)] == [f"TWIN@{other}"]
    with use(f"TWIN@{owner}"):
        assert twins.explain(SPEC, CPU).backend == "TWIN"


def test_one_that_cannot_serve_gives_its_own_reasons(twins: Registry) -> None:
    with pytest.raises(BackendUnavailableError) as error:
        twins.select(SPEC.replace(has_sinks=True), CPU, backend=f"TWIN@{A}")
    assert [reason.code for reason in error.value.reasons] == ["sink"]


def test_options_for_one_are_checked_against_it(twins: Registry) -> None:
    with pytest.raises(PolicyError, match="TWIN has no options"):
        twins.explain(SPEC, CPU, backend=f"TWIN@{A}", options={f"TWIN@{A}": {"tile": 16}})
    with pytest.raises(PolicyError, match="has keys that are not backends"):
        twins.explain(SPEC, CPU, options={"TWIN": {"tile": 16}})


def test_a_plugin_that_did_not_load_is_named_where_nobody_else_has_the_name(twins: Registry) -> None:
    with pytest.raises(
        PluginError, match=r"bad-exit, asked for by backend, did not load: .* SystemExit: 0 when"
    ):
        twins.select(SPEC, CPU, backend="bad-exit")
    with pytest.raises(UnknownBackendError) as error:
        twins.select(SPEC, CPU, backend="BAD_EXIT_BACKEND")
    assert "not loaded: attnplug-bad-exit:bad-exit raised SystemExit: 0 when imported" in str(error.value)
    with pytest.raises(NoBackendError, match="attnplug-bad-exit:bad-exit: attnplug-bad-exit:bad-exit raised"):
        twins.select(SPEC.replace(**Feature.MLA.fields(576), has_sinks=True), CPU)


def test_a_conflict_does_not_keep_a_registered_plugin_out(twins: Registry) -> None:
    twins.register(plugin(backend("MINE", 999)), "mine")
    assert twins.explain(SPEC, CPU).backend == "MINE"
    with pytest.raises(PluginError, match="again offers TWIN, which attnplug-bad-twin"):
        twins.register(plugin(backend("TWIN")), "again")


def test_a_name_refers_to_its_own_candidates_alone(twins: Registry) -> None:
    decision = twins.explain(SPEC, CPU)
    of = {
        each.distribution if each.name.startswith("TWIN") else each.name: each for each in decision.candidates
    }
    assert twins.plugins.refers_to("TORCH", of["TORCH"])
    assert not twins.plugins.refers_to("TORCH", of[A])
    assert not twins.plugins.refers_to("TWIN", of["TORCH"])
