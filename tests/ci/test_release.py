"""What a release checks before it publishes, and that no workflow runs code that can change under its name."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from check_version import disagreements

from attnplug.cli.commands.new_package import ATTNPLUG_SOURCE

ROOT = Path(__file__).parents[2]
RELEASED = {"0.1.0": "2c94214877f05c4bba1c0cb2761c230336270103a53781131db7c0a31e2d250f"}
"""The digest of each version's section in the changelog."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
WORKFLOWS = [
    *sorted((ROOT / ".github/workflows").glob("*.yml")),
    ROOT / "attnplug/templates/common/.github/workflows/ci.yml.tmpl",
]


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A copy of what names a version, with files as the build names them."""
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    dist = tmp_path / "dist"
    dist.mkdir()
    for name in (f"attnplug-{VERSION}.tar.gz", f"attnplug-{VERSION}-py3-none-any.whl"):
        (dist / name).touch()
    return tmp_path


def test_everything_names_one_version(release: Path) -> None:
    assert disagreements(f"v{VERSION}", release / "dist", release) == []


def test_the_script_succeeds_for_this_version_alone(release: Path) -> None:
    script = release / "ci" / "check_version.py"
    script.parent.mkdir()
    shutil.copy(ROOT / "ci" / "check_version.py", script)
    done = [
        subprocess.run([sys.executable, script, tag, release / "dist"], capture_output=True, text=True)
        for tag in (f"v{VERSION}", "v9.9.9")
    ]
    assert [each.returncode for each in done] == [0, 1]
    assert done[0].stderr == ""
    assert "9.9.9" in done[1].stderr


@pytest.mark.parametrize("tag", ["v9.9.9", VERSION])
def test_another_tag_is_refused(release: Path, tag: str) -> None:
    assert disagreements(tag, release / "dist", release)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("pyproject.toml", f'version = "{VERSION}"', 'version = "0.0.9"'),
        ("CITATION.cff", f"version: {VERSION}", "version: 0.0.9"),
        ("CHANGELOG.md", f"## {VERSION} (", "## Unreleased ("),
    ],
)
def test_each_place_is_read(release: Path, name: str, old: str, new: str) -> None:
    text = (release / name).read_text()
    assert old in text
    (release / name).write_text(text.replace(old, new))
    [sentence] = disagreements(f"v{VERSION}", release / "dist", release)
    assert name in sentence


def test_nothing_names_a_release_or_a_repository_that_does_not_exist() -> None:
    """Anyone may take a free name on PyPI: no text tells people to install attnplug from there before it is ours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    site = (ROOT / "mkdocs.yml").read_text()
    assert ("urls" in project) == ("\nrepo_url:" in site) == ("No repository is published yet" not in site)
    if "urls" not in project:
        named = [
            path
            for path in texts()
            if re.search(r"attnplug\.github\.io|github\.com/attnplug", path.read_text())
        ]
        assert named == []
    if ATTNPLUG_SOURCE != "attnplug":
        by_name = re.compile(r"pip install (-\S+ )*['\"]?attnplug(?![-\w])")
        assert [path for path in texts() if by_name.search(path.read_text())] == []


def texts() -> Iterator[Path]:
    """What people read or run: pages, sources, workflows and metadata."""
    suffixes = (".md", ".py", ".tmpl", ".toml", ".yml", ".cff", ".sh")
    for top in ("attnplug", "docs", "examples", "ci", ".github", "."):
        for path in (ROOT / top).glob("*" if top == "." else "**/*"):
            # The site that mkdocs builds is no source.
            if path.suffix in suffixes and path.is_file():
                yield path


def test_a_version_that_has_a_date_is_never_edited() -> None:
    """A change goes to the section Unreleased, and a release renames it and adds its digest here."""
    found = re.split(r"^## (.*)\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    sections = dict(zip(found[::2], found[1::2], strict=True))
    if "Unreleased" in sections:
        assert next(iter(sections)) == "Unreleased"
        del sections["Unreleased"]
    digests = {
        title.partition(" (")[0]: hashlib.sha256(text.strip().encode()).hexdigest()
        for title, text in sections.items()
    }
    assert digests == RELEASED
    assert next(iter(digests)) == VERSION


def test_a_file_too_many_or_too_few_is_told(release: Path) -> None:
    extra = release / "dist" / "attnplug-0.0.9.tar.gz"
    extra.touch()
    assert "attnplug-0.0.9.tar.gz" in disagreements(f"v{VERSION}", release / "dist", release)[0]
    extra.unlink()
    (release / "dist" / f"attnplug-{VERSION}.tar.gz").unlink()
    assert len(disagreements(f"v{VERSION}", release / "dist", release)) == 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_hash(path: Path) -> None:
    used = re.findall(r"^\s*(?:- )?uses: (\S+)(.*)$", path.read_text(), re.MULTILINE)
    assert used
    for action, comment in used:
        if not action.startswith("./"):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action} does not say its version"


def test_publishing_needs_no_secret_and_only_that_job_may_prove_its_identity() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "permissions" not in jobs["build"]
    assert jobs["publish"]["needs"] == "build"


def test_forms_for_bugs_require_the_doctor() -> None:
    for name in ("bug.yml", "backend.yml"):
        form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / name).read_text())
        doctor = next(part for part in form["body"] if part.get("id") == "doctor")
        assert "attnplug doctor --json" in doctor["attributes"]["label"]
        assert doctor["validations"]["required"]
