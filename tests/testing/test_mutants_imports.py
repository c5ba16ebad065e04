"""Modules of backends that change their process when they are imported or asked: the kit says what they do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnplug.core import Device
from attnplug.testing.conformance.check import ConformanceError
from attnplug.testing.conformance.process import lightness
from attnplug.testing.conformance.target import Target

HEAD = """
import {imports}
from attnplug.backends.torch_native import TorchBackend
"""
EFFECTS = {
    "os": ("os.environ['ACME_MODE'] = '1'", "changes the environment variables: ACME_MODE"),
    "os.path": ("os.path.os.chdir('/')", "changes the working directory"),
    "signal": ("signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "changes the handlers of signals"),
    "threading": (
        "threading.Thread(target=threading.Event().wait, name='acme', daemon=True).start()",
        "changes the threads: acme",
    ),
    "logging": ("logging.basicConfig(level='DEBUG')", "changes the root logger"),
    "random": ("random.seed(7)", "changes the random state"),
    "subprocess": ("subprocess.run(['true'])", "starts a process"),
    "socket": ("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))", "connects to"),
    "gc": ("gc.disable()", "changes the garbage collector"),
    "sys": ("sys.path.insert(0, '/acme')", "changes the sys.path: /acme"),
    "builtins": ("print('acme 1.0')", "prints to stdout"),
}
BY_HASH = """    @classmethod
    def get_priority(cls, spec, device, phase):
        return hash(str(spec.dtype)) % 999
"""
BY_SET = """    @classmethod
    def supports_combination(cls, spec, device):
        return 'odd ' + ' '.join({'one', 'two', 'three', 'four'}) if spec.has_sinks else None
"""
BY_PROCESS = """    @classmethod
    def get_priority(cls, spec, device, phase):
        return os.getpid() % 997
"""
ANSWERS = {BY_HASH: "get_priority is", BY_SET: "supports_combination is", BY_PROCESS: "get_priority is"}


PARTS = {
    "torch.set_default_dtype(torch.float64)": "changes default dtype: torch.float32 became torch.float64",
    "torch.set_num_threads(7)": "changes threads of torch: 1 became 7",
    "torch.manual_seed(7)": "changes random state of torch",
    "os.environ['ACME_HEAVY'] = '1'": "changes environment variable ACME_HEAVY: unset became '1'",
    "warnings.simplefilter('ignore')": "changes warnings filters",
    "print('acme kernels 1.0')": "prints to stdout",
}
WITH_PARTS = """    @classmethod
    def get_impl_cls(cls):
        import effective_backend_parts
        return super().get_impl_cls()
"""


@pytest.mark.parametrize("target", [("os", "", WITH_PARTS)], indirect=True)
def test_what_the_import_of_an_impl_changes_is_named(target: Target, tmp_path: Path) -> None:
    module = tmp_path / "effective_backend_parts.py"
    module.write_text("\n".join(["import os, warnings", "import torch", *PARTS, ""]))
    problem = problem_of(target, "declaration/no-effects-of-parts")
    assert problem.startswith("the import of the impl or the builder changes")
    for says in PARTS.values():
        assert says in problem


@pytest.fixture
def target(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Target]:
    """The backend of a module with this source, which is imported here before its effect is added."""
    imports, effect, body = request.param
    module = tmp_path / "effective_backend.py"
    source = HEAD.format(imports=imports) + f"class Effective(TorchBackend):\n{body}\n"
    module.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "effective_backend", raising=False)
    backend = importlib.import_module("effective_backend").Effective
    module.write_text(source + effect + "\n")
    yield Target(backend, Device("cpu"))
    monkeypatch.delitem(sys.modules, "effective_backend", raising=False)


def problem_of(target: Target, check_id: str) -> str:
    (check,) = (each for each in lightness.checks(target) if each.id == check_id)
    with pytest.raises(ConformanceError) as problem:
        check()
    return str(problem.value)


@pytest.mark.parametrize(
    ("target", "says"),
    [((imports, effect, "    pass"), says) for imports, (effect, says) in EFFECTS.items()],
    ids=EFFECTS,
    indirect=["target"],
)
def test_what_an_import_changes_is_named(target: Target, says: str) -> None:
    assert says in problem_of(target, "declaration/no-effects")


@pytest.mark.parametrize(
    ("target", "says"),
    [(("os", "", body), says) for body, says in ANSWERS.items()],
    ids=["hash", "set", "process"],
    indirect=["target"],
)
def test_answers_that_differ_between_processes_are_named(target: Target, says: str) -> None:
    problem = problem_of(target, "declaration/each-process")
    assert says in problem
    assert "in one process and" in problem


@pytest.mark.parametrize("target", [("os", "", "    pass")], indirect=True)
def test_a_module_without_effects_passes(target: Target) -> None:
    for check in lightness.checks(target):
        check()
