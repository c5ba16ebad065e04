"""Writes attnplug/core/interface/vllm_names.py: the names of vLLM's three base classes, read from its source.

Unpack the sources of vLLM's releases into one folder, each as `vllm-VERSION`, and name the folder:

    pip download --no-deps --no-binary vllm vllm==0.33.0
    tar xf vllm-0.33.0.tar.gz -C SOURCES
    python ci/vllm_names.py SOURCES

A release that PyPI adds later needs a folder that has it too. Then `pytest tests/registry/test_vllm_names.py` names what
is neither read nor refused. Needs nothing but Python; no code of vLLM runs.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TARGET = Path(__file__).parents[1] / "attnplug" / "core" / "interface" / "vllm_names.py"
CLASSES: Mapping[str, frozenset[str]] = {
    "BACKEND": frozenset({"AttentionBackend"}),
    "IMPL": frozenset(
        {"AttentionImplBase", "AttentionImpl", "MLAAttentionImpl", "SparseMLAAttentionImpl"},
    ),
    "BUILDER": frozenset({"AttentionMetadataBuilder"}),
}
"""vLLM's classes that each table has the names of."""
_HEAD = '''"""The names of vLLM's base classes, with the first and the last release that has each.

Made by `python ci/vllm_names.py`, which reads the class bodies in vLLM's source; do not edit it by hand.
"""

from __future__ import annotations

from collections.abc import Mapping


def _releases(text: str) -> dict[str, tuple[str, str]]:
    rows = (row.split() for row in text.split(","))
    return {name: (first, last) for name, first, last in rows}


'''


def names_of(source: str) -> dict[str, set[str]]:
    """The names that the base classes in one file define, annotate, or set on `self`, by table."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(source).body:
        for table, classes in CLASSES.items():
            if isinstance(node, ast.ClassDef) and node.name in classes:
                # Python itself calls names with two underscores; both projects have the same ones.
                names = (name for name in _of_class(node) if not name.startswith("__"))
                found.setdefault(table, set()).update(names)
    return found


def _of_class(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield part.name
            yield from (
                each.attr
                for each in ast.walk(part)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            )
        elif isinstance(part, (ast.Assign, ast.AnnAssign)):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            yield from (each.id for each in targets if isinstance(each, ast.Name))


def names_in(tree: Path) -> dict[str, set[str]]:
    """The names of all files of one release."""
    found: dict[str, set[str]] = {table: set() for table in CLASSES}
    for path in sorted(tree.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^class \w*Attention", text, re.MULTILINE):
            for table, names in names_of(text).items():
                found[table] |= names
    return found


def order(version: str) -> tuple[int, ...]:
    """A key that sorts versions of vLLM, such as 0.8.5.post1."""
    return tuple(map(int, re.findall(r"\d+", version)))


def module_of(releases: Mapping[str, Mapping[str, set[str]]]) -> str:
    """The text of the module, for the names by version and table."""
    versions = sorted(releases, key=order)
    lines = [_HEAD, f'VLLM_VERSIONS = "{versions[0]}", "{versions[-1]}"\n']
    lines.append(f'"""The first and the last of the {len(versions)} releases that were read."""\n')
    for table, classes in CLASSES.items():
        rows = []
        for name in sorted({each for names in releases.values() for each in names[table]}):
            having = [version for version in versions if name in releases[version][table]]
            rows.append(f"{name} {having[0]} {having[-1]}")
        text = textwrap.fill(", ".join(rows), 110, break_on_hyphens=False)
        lines.append(f'\nVLLM_{table}_NAMES: Mapping[str, tuple[str, str]] = _releases("""\n{text}\n""")\n')
        lines.append(f'"""Of {", ".join(sorted(classes))}."""\n')
    return "".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Write the module; 2 without a release, or where a release has not all three classes."""
    trees = sorted(Path(arguments[0]).glob("vllm-*")) if len(arguments) == 1 else []
    if not trees:
        print("usage: python ci/vllm_names.py FOLDER, with the sources of vLLM as FOLDER/vllm-VERSION")
        return 2
    releases = {tree.name.removeprefix("vllm-"): names_in(tree) for tree in trees if tree.is_dir()}
    lacking = [
        f"{version}: {table}" for version, each in releases.items() for table in each if not each[table]
    ]
    if lacking:
        print(f"no such class was found in {', '.join(lacking)}; add its new name to CLASSES")
        return 2
    TARGET.write_text(module_of(releases), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
