"""`doctor` against plugins that attack their own check: each gets a finding, and the others are still checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from attnplug.registry.plugins.records import ENTRY_POINT_GROUP

# Each attack is a process of its own, so they are slow.
pytestmark = [pytest.mark.attack("doctor"), pytest.mark.slow]

START = "import json, os, pathlib, shutil, signal, sys\nreport = pathlib.Path(sys.argv[2])\n"
ATTACKS = {
    "real_time_signal": ("os.kill(os.getpid(), 40)", "crashed importing {}: signal 40"),
    "named_signal": ("os.kill(os.getpid(), signal.SIGUSR1)", "crashed importing {}: SIGUSR1"),
    "half_line": ("report.open('a').write('{\"step\": \"do')\nATTNPLUG_API = (1, 1)", "damaged the report"),
    "garbage": (
        "report.write_bytes(b'\\xff\\x00[1, 2]\\n[]\\n')\nATTNPLUG_API = (1, 1)",
        "damaged the report",
    ),
    "deep": ("report.write_text('[' * 100000)\nATTNPLUG_API = (1, 1)", "damaged the report"),
    "wrong_types": (
        "report.write_text(json.dumps({'backends': 3, 'step': []}) + '\\n')",
        "damaged the report",
    ),
    "forged": (
        "report.write_text(json.dumps({'step': 'loaded attack-forged:forged'}) + '\\n')\nos._exit(0)",
        "its report lacks",
    ),
    "deleted": ("shutil.rmtree(report.parent)\nos._exit(0)", "left the process starting"),
    "folder": (
        "report.unlink()\nreport.mkdir()\nos._exit(3)",
        "raised starting: the process left with exit code 3",
    ),
    "fifo": ("report.unlink()\nos.mkfifo(report)\nos._exit(0)", "left the process starting"),
    "left": ("os._exit(0)", "left the process importing {}"),
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    site = tmp_path_factory.mktemp("site")
    for name, (attack, _) in ATTACKS.items():
        (site / f"attack_{name}.py").write_text(START + attack)
        info = site / f"attack_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: attack-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = attack_{name}\n")
    only = ",".join(ATTACKS) + ",attnplug"
    environment = {**os.environ, "PYTHONPATH": str(site), "ATTNPLUG_PLUGINS": only}
    # TORCH stands for those that work: each other backend would cost a process.
    environment["ATTNPLUG_BLOCK_PLUGINS"] = "flash_attn,flash_mla,flashinfer,triton"
    # The registry of the command's own child is attacked too: it loads every plugin to choose for a typical layer.
    ran = subprocess.run(
        [sys.executable, "-m", "attnplug", "doctor", "--json", "--timeout", "60"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1, ran.stderr
    return {finding["what"]: finding for finding in json.loads(ran.stdout)["findings"]}


@pytest.mark.parametrize("name", ATTACKS)
def test_doctor_reports_the_attack(name: str, findings: dict[str, dict[str, str]]) -> None:
    plugin = f"attack-{name}:{name}"
    assert findings[plugin]["state"] == "failed"
    assert ATTACKS[name][1].format(plugin) in findings[plugin]["detail"]


def test_the_other_backends_are_still_checked(findings: dict[str, dict[str, str]]) -> None:
    assert findings["TORCH (attnplug:torch)"]["state"] == "ok"
    assert findings["current device"]["state"] == "failed"
