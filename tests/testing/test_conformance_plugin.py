"""`pytest -p attnplug.testing.plugin --pyargs attnplug.testing.suite`: the kit for a backend by name."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest
from catching import variant
from fake_plugins import plugin
from few_checks import ACME, few_checks, noisy_checks

import attnplug
from attnplug.registry import default
from attnplug.testing.conformance import listing

pytest_plugins = ["pytester"]

SUITE = ("-p", "attnplug.testing.plugin", "--pyargs", "attnplug.testing.suite")


@pytest.fixture
def suite(pytester, monkeypatch):
    """`suite("--attn-backend", "ACME")` runs the suite here, with a few checks and ACME registered."""
    monkeypatch.setattr(default, "_registry", None)
    monkeypatch.setattr(listing, "GROUPS", {few_checks: False})
    fussy = variant("FUSSY", requires=("acme-kernels>=2",))
    broken = variant("BROKEN", get_impl_cls=lambda cls: 1 / 0)
    abroad = variant("ABROAD", device_types=("hpu",))
    rude = variant("RUDE", validate_configuration=lambda cls, *args: 1 / 0)
    members = [variant(name, family="CLAN") for name in ("CLAN_1", "CLAN_2")]
    attnplug.register(plugin(ACME, fussy, broken, abroad, rude, *members), "acme")
    return lambda *args: pytester.runpytest_inprocess(*SUITE, "--attn-device", "cpu", *args)


def test_the_plugin_is_not_loaded_by_itself():
    values = [entry.value for entry in entry_points(group="pytest11")]
    assert not [value for value in values if value.startswith("attnplug")]


def test_the_checks_of_a_registered_backend_run(suite):
    result = suite("--attn-backend", "ACME", "-v")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["attnplug: ACME (this process) on cpu, smoke, 3 checks", "*bad/fails*FAILED*"]
    )


def test_the_header_names_the_distribution(suite):
    suite("--attn-backend", "TORCH", "--collect-only", "-q")
    result = suite("--attn-backend", "TORCH", "--collect-only")
    result.stdout.fnmatch_lines("attnplug: TORCH (attnplug *) on cpu, smoke, 3 checks")


def test_full_has_what_smoke_has_not(suite):
    suite("--attn-backend", "ACME", "--level", "full").assert_outcomes(passed=2, failed=1, skipped=1)


def test_known_failures_come_from_a_file(suite, tmp_path):
    path = tmp_path / "known.toml"
    path.write_text('[known_failures]\n"bad/fails" = "acme#12"\n"good/full-*" = "of the other level"\n')
    suite("--attn-backend", "ACME", "--known-failures", path).assert_outcomes(passed=1, xfailed=1, skipped=1)


def test_shards_together_are_all(suite):
    seen = []
    for part in ("1/2", "2/2"):
        lines = suite("--attn-backend", "ACME", "--shard", part, "--collect-only", "-q").outlines
        seen += [line.partition("[")[2] for line in lines if "::test_conformance[" in line]
    assert sorted(seen) == ["bad/fails]", "good/passes]", "good/skips]"]


def test_what_is_written_to_standard_output_is_the_cause_of_a_failure(suite, monkeypatch):
    monkeypatch.setattr(listing, "GROUPS", {noisy_checks: False})
    result = suite("--attn-backend", "ACME", "-k", "noise", "--tb=line")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*wrote to stdout: 'acme: 4 blocks\\n'", "*wrote to stdout: 'xxx*x'... (300 characters)"]
    )


def test_output_of_a_check_that_fails_is_shown_with_it(suite, monkeypatch):
    def checks(target):
        from attnplug.testing.conformance.check import Check

        def run():
            print("first")
            print("second", file=sys.stderr)
            raise ValueError("third")

        yield Check("one/only", run, "fails")

    monkeypatch.setattr(listing, "GROUPS", {checks: False})
    result = suite("--attn-backend", "ACME")
    result.stdout.fnmatch_lines(
        ["*ValueError: third", "*Captured stdout call*", "first", "*stderr*", "second"]
    )


def test_a_check_without_memory_says_so(suite, monkeypatch):
    monkeypatch.setattr(listing, "GROUPS", {noisy_checks: False})
    result = suite("--attn-backend", "ACME", "-k", "memory", "--tb=line")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*out of memory: MemoryError", "*out of memory: can't allocate memory: 64 b*"]
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "--attn-backend NAME is missing; installed are *ACME*TORCH*"),
        (("--attn-backend", "ACM"), "--attn-backend='ACM' is not a backend; loaded are *did you mean ACME?"),
        (("--attn-backend", "CLAN"), "*'CLAN' is a family of backends; name one: CLAN_1, CLAN_2"),
        (("--attn-backend", "FUSSY"), "FUSSY does not run here on cpu: acme-kernels not installed*"),
        (("--attn-backend", "BROKEN"), "*BROKEN cannot be imported here*ZeroDivisionError*"),
        (
            ("--attn-backend", "ABROAD"),
            "ABROAD does not run here on cpu: device type not supported: cpu*hpu*",
        ),
        (("--attn-backend", "RUDE"), "*validate_configuration raised ZeroDivisionError*"),
        (("--attn-backend", "ACME", "--attn-device", "hpu"), "*on hpu: this machine has no hpu*"),
        (("--attn-backend", "ACME", "--attn-device", "nowhere"), "device='nowhere' is unknown*"),
        (("--attn-backend", "ACME", "--shard", "3/2"), "--shard='3/2' must be I/N*"),
        (("--attn-backend", "ACME", "--known-failures", "none.toml"), "*none.toml' cannot be read*"),
    ],
)
def test_what_is_in_the_way_is_a_usage_error(suite, args, said):
    result = suite(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(f"ERROR: {said}")


def test_a_known_failure_that_is_no_check_is_a_usage_error(suite, tmp_path):
    path = tmp_path / "known.toml"
    path.write_text('[known_failures]\n"bad/fials" = "acme#12"\n')
    result = suite("--attn-backend", "ACME", "--known-failures", path)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines("ERROR: *known.toml='bad/fials' matches no check; did you mean bad/fails?")


def test_the_suite_without_the_plugin_says_how_to_run_it(pytester):
    result = pytester.runpytest_inprocess("--pyargs", "attnplug.testing.suite")
    assert result.ret != 0
    result.stdout.fnmatch_lines("*needs a backend: pytest -p attnplug.testing.plugin *")


def test_the_plugin_leaves_other_tests_alone(pytester):
    pytester.makepyfile("def test_other(): pass")
    pytester.runpytest_inprocess("-p", "attnplug.testing.plugin").assert_outcomes(passed=1)
