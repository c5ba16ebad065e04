"""examples/plugins/attnplug-latent: only `decode` is written, in at most 120 lines, and the kit passes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugin_env import RunWithPlugins

SOURCE = Path(__file__).parents[2] / "examples" / "plugins" / "attnplug-latent"
MODEL = Path(__file__).parents[2] / "examples" / "models" / "deepseek-v3.json"


@pytest.fixture
def run(run_with_plugins: RunWithPlugins) -> RunWithPlugins:
    def run_with_latent(command: str | list[str]) -> str:
        done = run_with_plugins([SOURCE], command)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run_with_latent


def test_it_is_short_and_writes_only_the_decode() -> None:
    files = sorted((SOURCE / "attnplug_latent").glob("*.py"))
    assert sum(len(path.read_text().splitlines()) for path in files) <= 120
    methods = [line for line in files[1].read_text().splitlines() if line.strip().startswith("def ")]
    assert [each.strip() for each in methods] == ["def decode("]


def test_it_decodes_deepseek_v3_and_another_backend_prefills(run: RunWithPlugins) -> None:
    rows = [
        line.split() for line in run(["-m", "attnplug", "select", str(MODEL), "--device", "cpu"]).splitlines()
    ]
    assert ["61", "0-60", "128/1", "576", "MLA", "TORCH", "LATENT", "16"] in rows


def test_it_serves_both_phases_of_deepseek_v3_2(run: RunWithPlugins) -> None:
    table = run(["-m", "attnplug", "select", str(MODEL.with_name("deepseek-v3.2.json")), "--device", "cpu"])
    assert "MLA, sparse token_topk 2048  LATENT   LATENT     16" in table


@pytest.mark.slow  # `.ci/run` runs a share of `attnplug conformance LATENT` with the wheel
@pytest.mark.rare
def test_checks_of_the_kit_pass(run: RunWithPlugins) -> None:
    code = """
from attnplug.registry.default import get_registry
from attnplug.testing.conformance import conformance_checks
backend = get_registry().backends()["LATENT"]
checks = [c for c in conformance_checks(backend, device="cpu") if c.id.startswith("mla+TORCH/correct/latent")]
for check in checks:
    check()
print(len(checks) > 40)
"""
    assert run(code) == "True\n"
