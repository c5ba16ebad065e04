"""The README does what it says: every command and every line of Python in it is run."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workplace import readers_environment, run_python

import attnplug

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Each `$ command` of the console blocks with the output shown below it."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


@pytest.mark.parametrize(("command", "shown"), commands(), ids=[command for command, _ in commands()])
def test_a_command_prints_what_the_readme_shows(command: str, shown: str) -> None:
    program, *arguments = command.split()
    assert program == "attnplug"
    done = subprocess.run(
        [sys.executable, "-m", "attnplug", *arguments],
        cwd=ROOT,
        env={**readers_environment(), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    printed = "".join(line.rstrip() + "\n" for line in done.stdout.splitlines())
    assert printed == shown


def test_the_python_session_gives_what_the_readme_shows() -> None:
    sessions = [block for block in blocks("python") if block.startswith(">>>")]
    assert len(doctest.DocTestParser().get_examples("".join(sessions))) > 5
    run_python("-m", "doctest", "README.md")


def test_the_backend_shown_loads_and_is_refused_only_for_what_is_not_installed() -> None:
    (code,) = (block for block in blocks("python") if not block.startswith(">>>"))
    namespace: dict[str, object] = {"__name__": "attnplug_acme"}
    exec(code, namespace)
    module = type(sys)("attnplug_acme")
    vars(module).update(namespace)
    registry = attnplug.Registry(plugins=[module])
    spec = attnplug.LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    (acme,) = registry.explain(spec, "sm90").candidates
    assert acme.codes == ("not_installed",)
    assert registry.explain(spec, "sm90", assume_installed="all").backend == "ACME"


def test_the_links_lead_to_files_of_the_repository() -> None:
    links = [*re.findall(r"\]\(([^)#]+)", TEXT), *re.findall(r'src(?:set)?="([^"]+)"', TEXT)]
    assert len(links) > 15
    local = [link for link in links if not link.startswith("https://")]
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_the_readme_is_short_and_installs_first() -> None:
    assert len(TEXT.splitlines()) <= 140
    assert re.findall(r"^## (.*)$", TEXT, re.MULTILINE)[0] == "Install"


def test_the_two_set_up_lines_stand_as_they_are_run() -> None:
    assert "\npip install -c constraints.txt -e '.[test]' && pytest\n" in TEXT
    assert re.search(
        r"^pip install -c constraints.txt -e '\.\[models\]' && attnplug select \S+$", TEXT, re.MULTILINE
    )
