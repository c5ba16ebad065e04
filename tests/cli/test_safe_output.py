"""Text of hostile plugins and files reaches the terminal escaped: no command prints a control character."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnplug import LayerSpec, Registry, explain, hookimpl
from attnplug._system.text import safe_text, shown
from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.core import Reason
from attnplug.errors import AttnplugError, BatchError, NoBackendError, PluginError
from attnplug.registry.plugins.records import ENTRY_POINT_GROUP

pytestmark = pytest.mark.attack("terminal")

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxt\u2066\u200b\x7f\r\x00\ud800"
"""Sets a title, clears the screen, colours, reorders, hides; and a lone surrogate, which UTF-8 cannot write."""
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ud800-\udfff]")
SPEC = LayerSpec(num_heads=2, num_kv_heads=2, head_size=64)

MODULE = r"""
import sys
from attnplug import hookimpl
from attnplug.backends.torch_native.backend import TorchBackend

ATTNPLUG_API = (1, 1)
HOSTILE = "\x1b[31m\x9b2J\u202eevil\r"


class Refuses(TorchBackend):
    requires = ("no-such-dist" + HOSTILE,)

    @staticmethod
    def get_name():
        return "REFUSES"

    @classmethod
    def get_priority(cls, spec, device, phase):
        return 300

    @classmethod
    def supports_combination(cls, spec, device):
        return "because" + HOSTILE + "\nTORCH  accepted"


class Raises(Refuses):
    requires = ()

    @staticmethod
    def get_name():
        return "RAISES"

    @classmethod
    def supports_combination(cls, spec, device):
        raise type("Class" + HOSTILE, (ValueError,), {})("message" + HOSTILE)


Refuses.device_types = ("cpu", "typ" + HOSTILE)


@hookimpl
def attnplug_backends():
    return [Refuses, Raises]
"""


@pytest.fixture
def hostile_site(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with distributions whose metadata attack the terminal, on any file system."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "evil_module.py").write_text(MODULE)
    (site / "bad_name.py").write_text(MODULE.replace('"REFUSES"', '"bad name" + HOSTILE'))
    (site / "raises.py").write_text('raise RuntimeError("raised" + "\\x1b[31m\\x9b2J\\u202eevil\\ud800")')
    dists = {
        "evil": f"evil{HOSTILE}",
        "forger": "forger\n TORCH   999  attnplug",
        "plain": "plain",
        "bad_name": "bad-name",
        "raises": "raises",
    }
    modules = {"plain": "evil_module", "bad_name": "bad_name", "raises": "raises"}
    for folder, name in dists.items():
        info = site / f"{folder}-1.0.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0{HOSTILE if folder == 'evil' else ''}\n"
        (info / "METADATA").write_bytes(text.encode("utf-8", "ignore"))
        module = modules.get(folder, f"evil_module{HOSTILE}")
        lines = f"[{ENTRY_POINT_GROUP}]\n{folder}{HOSTILE} = {module}\n"
        (info / "entry_points.txt").write_bytes(lines.replace("\r", "").encode("utf-8", "ignore"))
    return site


def run(site: Path, *command: str, **more: str) -> bytes:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONIOENCODING": "utf-8:strict", "NO_COLOR": "1"}
    environment |= more
    ran = subprocess.run(
        [sys.executable, "-m", "attnplug", *command], env=environment, capture_output=True, timeout=120
    )
    assert b"Traceback" not in ran.stderr, ran.stderr.decode()
    return ran.stdout + ran.stderr


QUICK = (["list", "--no-load"], ["list"])
COMMANDS = [
    ["list", "--no-load"],
    ["list"],
    ["list", "--json"],
    ["show", "REFUSES"],
    ["show", "RAISES"],
    ["explain", "--num-heads", "2", "--num-kv-heads", "2", "--head-size", "64", "--device", "cpu"],
    ["doctor", "--timeout", "20"],
]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=" ".join(command), marks=() if command in QUICK else pytest.mark.slow)
        for command in COMMANDS
    ],
)
def test_no_command_prints_what_controls_a_terminal(command: list[str], hostile_site: Path) -> None:
    # Doctor starts a process for each backend, and those of kernel libraries print nothing of a plugin.
    more = (
        {"ATTNPLUG_BLOCK_PLUGINS": "flash_attn,flash_mla,flashinfer,triton"} if command[0] == "doctor" else {}
    )
    text = run(hostile_site, *command, **more).decode()
    assert not (found := UNSAFE.search(text)), text[max(0, found.start() - 80) : found.end() + 40].encode()


def test_a_refusal_and_a_plugin_fault_are_one_line_each() -> None:
    class Refuses(TorchBackend):
        @classmethod
        def supports_combination(cls, spec: object, device: object) -> str:
            return f"because{HOSTILE}\nTORCH accepted"

        @staticmethod
        def get_name() -> str:
            return "REFUSES"

        @classmethod
        def get_priority(cls, *asked: object) -> int:
            return 300

    class Plugin:
        ATTNPLUG_API = (1, 1)

        @hookimpl
        def attnplug_backends(self) -> list[type[TorchBackend]]:
            return [Refuses]

    registry = Registry({"hostile": Plugin()})
    decision = registry.explain(SPEC, "cpu")
    (reason,) = decision.refused[0].reasons
    assert "\n" not in reason
    assert not UNSAFE.search(reason)
    assert not UNSAFE.search(str(decision) + decision.explanation())
    with pytest.raises(NoBackendError) as error:
        registry.select(SPEC, "cpu")
    assert not UNSAFE.search(str(error.value))


def test_every_error_is_safe_to_print() -> None:
    class Unreadable:
        def __repr__(self) -> str:
            raise RuntimeError(HOSTILE)

    for error in (
        AttnplugError(f"a{HOSTILE}"),
        PluginError(f"a{HOSTILE}"),
        BatchError("field", Unreadable(), f"limit{HOSTILE}", f"remedy{HOSTILE}"),
        BatchError(f"field{HOSTILE}", HOSTILE, "limit"),
        BatchError("field", 10**5000, "limit"),
    ):
        assert str(error)
        assert not UNSAFE.search(str(error))
        str(error).encode()
    assert len(str(BatchError("field", "x" * 10**6, "limit"))) < 1100


def test_text_without_such_characters_stays_as_it_is() -> None:
    for text in ("plain", "two\nlines\tand a tab", "Grüße, 注意, ✓ → 🙂", ""):
        assert safe_text(text) == text
        assert safe_text(safe_text(text + HOSTILE)) == safe_text(text + HOSTILE)
    assert safe_text("\x1b\u202e\ud800") == r"\x1b\u202e\ud800"
    assert shown([1, "a"]) == "[1, 'a']"
    assert str(Reason("no\nTORCH yes", code="combination")) == "no TORCH yes"
    assert explain(SPEC, "cpu").backend == "TORCH"
