"""Two good plugins, really installed: what they are chosen for, and every reason where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from plugin_env import RunWithPlugins

from attnplug import LayerSpec, Phase, Registry
from attnplug.errors import BackendUnavailableError

GOOD = ("attnplug-acme-decode", "attnplug-acme-sm80")
SPEC = LayerSpec(num_heads=8, num_kv_heads=2, head_size=128)
See = Callable[..., None]


def test_explain_lists_every_reason_against_a_backend_from_the_command_line(
    run_with_plugins: RunWithPlugins,
) -> None:
    layer = "--head-size 80 --kv-cache-dtype fp8 --sinks --soft-cap 30 --device sm75 --assume-installed here --json"
    done = run_with_plugins(GOOD, ["-m", "attnplug", "explain", *layer.split()])
    candidates = {each["name"]: each for each in json.loads(done.stdout)["candidates"]}
    sm80 = candidates["ACME_SM80"]
    assert [reason["code"] for reason in sm80["reasons"]] == [
        "head_size",
        "kv_cache_dtype",
        "sink",
        "compute_capability",
        "feature.soft_cap",
        "not_installed",
    ]
    assert (sm80["refused_at"], sm80["priority"]) == ("installed", 250)
    assert sm80["reasons"][0]["text"] == "head_size not supported: 80 is not one of 64, 128"
    # On this GPU no installation helps.
    assert (sm80["reasons"][-1]["text"], sm80["reasons"][-1]["remedy"]) == ("flash-attn not installed", None)


def test_a_what_if_with_everything_installed_chooses_among_all_by_priority(see_plugins: See) -> None:
    see_plugins(*GOOD)
    found = Registry().explain(SPEC, "sm90", "decode", assume_installed="all")
    priorities = {each.name: each.priority for each in found.candidates if each.accepted}
    ours = ["ACME_DECODE", "ACME_SM80", "TORCH"]
    assert [name for name in priorities if name in ours] == ours
    assert [priorities[name] for name in ours] == [300, 250, 0]
    assert list(priorities.values()) == sorted(priorities.values(), reverse=True)
    assert (found.level, found.assumed) == ("declared", "all")


@pytest.mark.parametrize(("version", "codes"), [("2.6.3", ("version",)), ("2.7", ()), ("2.8.3.post1", ())])
def test_a_what_if_judges_by_the_versions_assumed(
    version: str, codes: tuple[str, ...], see_plugins: See
) -> None:
    see_plugins(*GOOD)
    found = Registry().explain(SPEC, "sm90", assume_installed={"Flash_Attn": version})
    (sm80,) = [each for each in found.candidates if each.name == "ACME_SM80"]
    assert sm80.codes == codes
    assert found.assumed == (("flash-attn", version),)


def test_decode_steps_prefer_the_backend_that_is_made_for_them(see_plugins: See) -> None:
    see_plugins(*GOOD)
    registry = Registry()
    assert registry.select(SPEC, "sm90", Phase.DECODE, assume_installed="all").backend == "ACME_DECODE"
    assert registry.select(SPEC, "cpu", "decode", assume_installed="all").backend == "ACME_DECODE"
    assert registry.select(SPEC, "cpu", "prefill", assume_installed="all").backend != "ACME_DECODE"


@pytest.mark.parametrize("phase", [None, "prefill"])
def test_a_backend_for_decode_refuses_the_rest_with_phase(phase: str | None, see_plugins: See) -> None:
    see_plugins(*GOOD)
    with pytest.raises(BackendUnavailableError) as refused:
        Registry().select(SPEC, "cpu", phase, backend="ACME_DECODE")
    assert [reason.code for reason in refused.value.reasons] == ["phase"]
    assert refused.value.reasons[0].requested == "prefill"


def test_good_plugins_are_recorded_with_who_ships_them(see_plugins: See) -> None:
    see_plugins(*GOOD)
    records = {record.distribution: record for record in Registry().records}
    sm80 = records["attnplug-acme-sm80"]
    assert (sm80.name, sm80.version) == ("attnplug-acme-sm80:acme-sm80", "0.1.0")
    assert sm80.to_dict() == {
        "name": "attnplug-acme-sm80:acme-sm80",
        "distribution": "attnplug-acme-sm80",
        "version": "0.1.0",
        "status": "loaded",
        "reason": None,
        "backends": ["ACME_SM80"],
        "formats": [],
    }
