"""Every kind of hostile plugin, really installed: contained, recorded, and harmless to the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plugin_env import RunWithPlugins, distribution_names

pytestmark = pytest.mark.attack("declarations")

GOOD = "attnplug-acme-decode"
ASK = """
import json, sys
import attnplug
from attnplug.registry import get_registry, list_backends
spec = attnplug.LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
registry = get_registry()
try:
    by_name = attnplug.select(spec, "cpu", "decode", backend=sys.argv[1], assume_installed="all").backend
except attnplug.errors.AttnplugError as error:
    by_name = f"{type(error).__name__}: {error}"
print(json.dumps({
    "records": {record.distribution: record.to_dict() for record in registry.records},
    "explained": attnplug.explain(spec, "cpu").to_dict(),
    "good": attnplug.select(spec, "cpu", "decode", backend="ACME_DECODE", assume_installed="all").backend,
    "torch": attnplug.select(spec, "cpu", backend="TORCH", assume_installed="all").backend,
    "backends": sorted(list_backends()),
    "by_name": by_name,
}))
"""
BROKEN = {
    "bad-import": ("broken", "raised ImportError: ", "when imported"),
    "bad-exit": ("broken", "raised SystemExit: 0 when imported"),
    "bad-not-a-sequence": (
        "broken",
        "returned 1 from attnplug_backends; it must be a sequence of backend classes",
    ),
    "bad-not-a-backend": ("broken", "BadNotABackend'>, which is not a subclass of AttentionBackend"),
    "bad-misspelt": ("broken", "unknown hook 'attnplug_backend'"),
    "bad-future-hook": ("broken", "attnplug_rank", "budget"),
    "bad-no-api": ("broken", "add ATTNPLUG_API = (1, 1)"),
    "bad-api-range": ("incompatible", "is for plugin interface 97 to 99; this attnplug offers 1"),
    "bad-ported": (
        "broken",
        "offers BadPorted, which does not follow the interface",
        "BadPorted.forward_includes_kv_cache_update is not read by attnplug; write update_kv_cache and attend",
        "BadPorted.supports_non_causal is not read by attnplug; declare Feature.NON_CAUSAL in features",
        "write def get_supported_kernel_block_sizes(cls, spec=None, device=None)",
        "cache_dtype='auto', head_size_v=None)",
        "write def get_kv_cache_stride_order(cls, include_num_layers_dimension=False, *, layout=None, spec=None)",
        "BadPorted.supports_combination has vLLM's arguments; write def supports_combination(cls, spec, device)",
    ),
    "bad-squats-torch": ("conflict", "offers TORCH, a name reserved for attnplug's own backend"),
}
"""Those that do not load, with the status and the words of their records."""
REFUSED = {
    "bad-raises": "raised RuntimeError: acme: no licence for this device in validate_configuration",
    "bad-returns-string": "returned 'layer not supported on Tuesdays' from validate_configuration",
}
"""Those that load and fail when they are asked, with the words of the one reason against them."""
WARNED = {
    "bad-imports-torch": "imports torch when listed; import that in get_impl_cls or get_builder_cls",
    "bad-ranks": "has a hook attnplug_rank that is not called: ATTNPLUG_RANK does not name it",
}
"""Those that load with a warning."""
DANGEROUS_DOORS = ("bad-aborts", "bad-door-hangs", "bad-missing-symbol")
"""Those that look sound until somebody opens a door."""
TWINS = ("attnplug-bad-twin-a", "attnplug-bad-twin-b")


def ask(run: RunWithPlugins, *kinds: str, by_name: str = "TORCH", **env: str) -> dict[str, Any]:
    """What a child answers that has every plugin installed and lets only these and a good one load."""
    allowed = ",".join([GOOD, *(f"attnplug-{kind}" for kind in kinds)])
    done = run(distribution_names(), ["-c", ASK, by_name], env={"ATTNPLUG_PLUGINS": allowed, **env})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_others_work(found: dict[str, Any]) -> None:
    assert found["torch"] == "TORCH"
    assert found["good"] == "ACME_DECODE"
    assert found["records"]["attnplug"]["status"] == "loaded"
    assert found["records"][GOOD]["status"] == "loaded"
    assert found["records"][GOOD]["reason"] is None


def candidate(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = [each for each in found["explained"]["candidates"] if each["name"] == name]
    return dict(one)


def offered_by(kind: str) -> str:
    return kind.upper().replace("-", "_")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_hostile_plugin_that_cannot_load_is_recorded_and_left_out(
    kind: str, run_with_plugins: RunWithPlugins
) -> None:
    found = ask(run_with_plugins, kind, by_name=f"attnplug-{kind}")
    status, *words = BROKEN[kind]
    record = found["records"][f"attnplug-{kind}"]
    assert record["status"] == status
    assert record["reason"].startswith(f"attnplug-{kind}:{kind} ")
    assert all(word in record["reason"] for word in words), record["reason"]
    assert record["backends"] == []
    assert_others_work(found)
    refused = candidate(found, f"attnplug-{kind}:{kind}")
    assert refused["refused_at"] == "plugin"
    lines = [line.removeprefix("- ") for line in record["reason"].splitlines()]
    assert [reason["text"] for reason in refused["reasons"]] == lines
    asked_for = f"PluginError: attnplug-{kind}, asked for by backend, did not load: {record['reason']}"
    assert found["by_name"] == asked_for
    assert set(found["backends"]) >= {"TORCH", "ACME_DECODE"}
    assert offered_by(kind) not in found["backends"]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_hostile_plugin_that_fails_when_asked_is_refused_with_one_reason(
    kind: str, run_with_plugins: RunWithPlugins
) -> None:
    found = ask(run_with_plugins, kind, by_name=offered_by(kind))
    assert found["records"][f"attnplug-{kind}"]["status"] == "loaded"
    (reason,) = candidate(found, offered_by(kind))["reasons"]
    assert reason["code"] == "plugin_error"
    assert REFUSED[kind] in reason["text"]
    assert kind.replace("-", "_") in reason["text"]
    assert found["by_name"].startswith(f"BackendUnavailableError: {offered_by(kind)}, asked for by backend")
    assert REFUSED[kind] in found["by_name"]
    assert found["explained"]["backend"] == "TORCH"
    assert_others_work(found)


@pytest.mark.parametrize("kind", WARNED)
def test_a_hostile_plugin_that_misbehaves_mildly_is_loaded_with_a_warning(
    kind: str, run_with_plugins: RunWithPlugins
) -> None:
    found = ask(run_with_plugins, kind, by_name=offered_by(kind))
    record = found["records"][f"attnplug-{kind}"]
    assert (record["status"], record["backends"]) == ("loaded", [offered_by(kind)])
    assert record["reason"] == f"attnplug-{kind}:{kind} {WARNED[kind]}"
    assert found["by_name"] == offered_by(kind)
    assert_others_work(found)


@pytest.mark.parametrize("kind", DANGEROUS_DOORS)
def test_a_hostile_door_is_not_opened_by_explain_or_by_a_what_if(
    kind: str, run_with_plugins: RunWithPlugins
) -> None:
    found = ask(run_with_plugins, kind, by_name=offered_by(kind))
    record = found["records"][f"attnplug-{kind}"]
    assert (record["status"], record["reason"]) == ("loaded", None)
    assert (found["explained"]["backend"], found["explained"]["level"]) == (offered_by(kind), "declared")
    assert found["by_name"] == offered_by(kind)
    assert_others_work(found)


def test_hostile_twins_conflict_and_each_can_be_asked_for(run_with_plugins: RunWithPlugins) -> None:
    found = ask(run_with_plugins, "bad-twin-a", "bad-twin-b", by_name="TWIN")
    choices = " or ".join(f"TWIN@{name}" for name in TWINS)
    assert (
        found["by_name"] == f"PluginError: TWIN is offered by more than one distribution; ask for {choices}"
    )
    assert "TWIN" not in found["backends"]
    assert found["explained"]["backend"] == "TORCH"
    for name, other in (TWINS, TWINS[::-1]):
        record = found["records"][name]
        assert record["status"] == "conflict"
        assert record["reason"].startswith(f"{name}:{name[9:]} offers TWIN, and so does {other}:{other[9:]}")
        assert candidate(found, f"TWIN@{name}")["refused_at"] == "plugin"
    assert_others_work(found)


@pytest.mark.parametrize("name", ["TWIN@attnplug-bad-twin-a", "TWIN@attnplug_bad_twin_a"])
def test_one_of_hostile_twins_is_picked_by_who_ships_it(name: str, run_with_plugins: RunWithPlugins) -> None:
    found = ask(run_with_plugins, "bad-twin-a", "bad-twin-b", by_name=name)
    assert found["by_name"] == "TWIN"


def test_a_hostile_twin_alone_is_a_plugin_like_any_other(run_with_plugins: RunWithPlugins) -> None:
    found = ask(run_with_plugins, "bad-twin-a", by_name="TWIN")
    assert found["by_name"] == "TWIN"
    assert found["records"][TWINS[0]]["status"] == "loaded"


def test_a_hostile_plugin_that_hangs_is_never_run_where_it_is_blocked(
    run_with_plugins: RunWithPlugins,
) -> None:
    env = {"ATTNPLUG_BLOCK_PLUGINS": "bad-hang"}
    done = run_with_plugins(["attnplug-bad-hang"], ["-m", "attnplug", "list", "--json"], env=env)
    plugins = {record["name"]: record for record in json.loads(done.stdout)["plugins"]}
    blocked = plugins["attnplug-bad-hang:bad-hang"]
    assert blocked["status"] == "blocked"
    assert blocked["reason"] == "attnplug-bad-hang:bad-hang is left out by ATTNPLUG_BLOCK_PLUGINS"


def test_listing_hostile_plugins_without_loading_runs_none_of_them(run_with_plugins: RunWithPlugins) -> None:
    done = run_with_plugins(distribution_names(), ["-m", "attnplug", "list", "--no-load", "--json"])
    shown = {row["plugin"] for row in json.loads(done.stdout)["plugins"]}
    assert shown >= {f"{name}:{name.removeprefix('attnplug-')}" for name in distribution_names()}


def test_all_hostile_plugins_at_once_leave_the_good_ones_alone(run_with_plugins: RunWithPlugins) -> None:
    names = [name for name in distribution_names() if name != "attnplug-bad-hang"]
    done = run_with_plugins(names, ["-m", "attnplug", "list", "--json"])
    listed = json.loads(done.stdout)
    status = {record["distribution"]: record["status"] for record in listed["plugins"]}
    assert {name for name, found in status.items() if found == "loaded"} >= {
        "attnplug",
        *(name for name in names if name.startswith("attnplug-acme")),
    }
    assert {name for name, found in status.items() if found != "loaded"} == {
        *(f"attnplug-{kind}" for kind in BROKEN),
        *TWINS,
    }
    shown = [row["name"] for row in listed["backends"]]
    assert {"TORCH", "ACME_DECODE", "ACME_SM80"} <= set(shown)
    assert "TWIN" not in shown


@pytest.mark.parametrize("kinds", [["bad-import"], ["bad-twin-a", "bad-twin-b"], [*BROKEN]], ids=len)
def test_hostile_plugins_fail_the_list_under_strict_mode(
    kinds: list[str], run_with_plugins: RunWithPlugins
) -> None:
    """Each of them is named: one alone, two of one name, and all that do not load."""
    env = {
        "ATTNPLUG_STRICT": "1",
        "ATTNPLUG_PLUGINS": ",".join(f"attnplug-{each}" for each in kinds),
    }
    done = run_with_plugins(distribution_names(), ["-m", "attnplug", "list"], env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("attnplug: ATTNPLUG_STRICT is set and plugins did not load: ")
    assert all(f"attnplug-{each}:{each} " in done.stderr for each in kinds)
    assert "Traceback" not in done.stderr


def test_strict_mode_minds_no_plugin_that_was_left_out_on_purpose(run_with_plugins: RunWithPlugins) -> None:
    env = {"ATTNPLUG_STRICT": "1", "ATTNPLUG_PLUGINS": GOOD}
    assert run_with_plugins(distribution_names(), ["-m", "attnplug", "list"], env=env).returncode == 0


def test_a_hostile_ranker_ranks_only_where_it_is_invited(run_with_plugins: RunWithPlugins) -> None:
    uninvited = ask(run_with_plugins, "bad-raises", "bad-ranks", "bad-twin-a")["explained"]
    assert (uninvited["backend"], uninvited["ranked_by"]) == ("TWIN", [])
    invited = ask(run_with_plugins, "bad-ranks", "bad-twin-a", ATTNPLUG_RANK="bad-ranks")
    assert invited["records"]["attnplug-bad-ranks"]["reason"] is None
    assert invited["explained"]["backend"] == "BAD_RANKS"
    assert invited["explained"]["chosen_by"] == "rank"
    assert invited["explained"]["ranked_by"] == ["attnplug-bad-ranks:bad-ranks"]


REAL_SELECTION = """
import attnplug
spec = attnplug.LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
decision = attnplug.select(spec, "cpu")
print(decision.backend, decision.level, [c.codes for c in decision.candidates if "BAD" in c.name])
try:
    attnplug.select(spec, "cpu", backend="BAD_MISSING_SYMBOL")
except attnplug.errors.BackendUnavailableError as error:
    print(error.reasons[0].code, error)
"""


@pytest.mark.slow
def test_a_hostile_door_that_raises_passes_the_layer_on_but_not_where_it_is_asked_for(
    run_with_plugins: RunWithPlugins,
) -> None:
    done = run_with_plugins(["attnplug-bad-missing-symbol"], REAL_SELECTION)
    automatic, *by_name = done.stdout.splitlines()
    assert automatic == "TORCH usable [('import_failed',)]", done.stderr
    assert by_name[0].startswith("import_failed BAD_MISSING_SYMBOL, asked for by backend, does not serve")
    assert "get_impl_cls raised ImportError: cannot import name 'acme_varlen_attention'" in by_name[1]
    assert "attnplug doctor BAD_MISSING_SYMBOL" in by_name[1]


def doctor(run: RunWithPlugins, names: list[str], *options: str) -> dict[str, tuple[str, str]]:
    # The plugins of three kernel libraries are left out: TORCH stands for those that work.
    left_out = {"ATTNPLUG_BLOCK_PLUGINS": "flash_attn,flash_mla,flashinfer,triton"}
    done = run(names, ["-m", "attnplug", "doctor", "--json", *options], env=left_out)
    assert done.returncode == 1, done.stderr
    findings = json.loads(done.stdout)["findings"]
    return {finding["what"].split(" ")[0]: (finding["state"], finding["detail"]) for finding in findings}


@pytest.mark.slow
def test_doctor_gives_up_on_hostile_plugins_that_hang_and_names_them(
    run_with_plugins: RunWithPlugins,
) -> None:
    names = ["attnplug-bad-hang", "attnplug-bad-door-hangs"]
    found = doctor(run_with_plugins, names, "--timeout", "2")
    hung = "hung importing attnplug-bad-hang:bad-hang: killed after 2 s"
    assert found["attnplug-bad-hang:bad-hang"] == ("failed", hung)
    assert found["BAD_DOOR_HANGS"] == ("failed", "hung in get_impl_cls: killed after 2 s")


@pytest.mark.slow
def test_doctor_survives_hostile_doors_and_gives_each_one_line(run_with_plugins: RunWithPlugins) -> None:
    names = ["attnplug-bad-aborts", "attnplug-bad-missing-symbol", "attnplug-bad-exit"]
    found = doctor(run_with_plugins, names)
    assert found["BAD_ABORTS"] == ("failed", "crashed in get_impl_cls: SIGABRT")
    state, detail = found["BAD_MISSING_SYMBOL"]
    assert state == "failed"
    assert detail.startswith("raised in get_impl_cls: ImportError: cannot import name")
    assert found["attnplug-bad-exit:bad-exit"][0] == "failed"
    assert found["TORCH"][0] == "ok"
