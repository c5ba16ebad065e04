"""Whether a tag, pyproject.toml, CITATION.cff, the changelog and the built files name one version.

python ci/check_version.py v0.1.0 dist
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def disagreements(tag: str, dist: Path, root: Path = ROOT) -> list[str]:
    """A sentence for each place that does not name the version of `tag`, such as `v0.1.0`."""
    version = tag.removeprefix("v")
    if tag == version:
        return [f"the tag {tag!r} must be v and a version, such as v0.1.0"]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [] if project["version"] == version else [f"pyproject.toml has version {project['version']}"]
    dated = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
    if not re.search(dated, (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        found.append(f"CHANGELOG.md has no heading `## {version} (YYYY-MM-DD)`")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    if not re.search(rf"^version: {re.escape(version)}$", citation, re.MULTILINE):
        found.append(f"CITATION.cff does not have `version: {version}`")
    expected = {f"attnplug-{version}.tar.gz", f"attnplug-{version}-py3-none-any.whl"}
    files = {path.name for path in dist.iterdir()} if dist.is_dir() else set()
    if files != expected:
        found.append(f"{dist} holds {sorted(files)}, not {sorted(expected)}")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} TAG DIST")
    wrong = disagreements(sys.argv[1], Path(sys.argv[2]))
    sys.exit("\n".join(wrong) or 0)
