"""What the packages export: once for type checkers, once when it is used, and nothing else."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

from attnplug.core._lazy import lazy_exports

PACKAGES = [
    *("attnplug", "attnplug.core", "attnplug.core.batch", "attnplug.ops"),
    *("attnplug.registry", "attnplug.runtime", "attnplug.testing", "attnplug.testing.conformance"),
]


def tree_of(package: str) -> ast.Module:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def names_for_type_checkers(tree: ast.Module) -> list[str]:
    """The names imported under `if TYPE_CHECKING`, each of which must be re-exported as itself."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                for alias in statement.names:
                    assert alias.asname == alias.name, f"{alias.name} is not re-exported"
                    names.append(alias.name)
    return names


def lazy_homes(tree: ast.Module) -> dict[str, str]:
    """The map given to `lazy_exports`, from each name to the module that defines it."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lazy_exports"
    ]
    assert len(calls) == 1
    exports: dict[str, str] = ast.literal_eval(calls[0].args[1])
    return {name: home for home, names in exports.items() for name in names.split()}


def homes_for_type_checkers(package: str, tree: ast.Module) -> dict[str, str]:
    homes = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package):
            home = node.module.removeprefix(package).removeprefix(".")
            homes |= {alias.name: home for alias in node.names if alias.asname}
    return homes


@pytest.mark.parametrize("package", PACKAGES)
def test_every_list_of_names_is_the_same(package: str) -> None:
    module, tree = importlib.import_module(package), tree_of(package)
    assert sorted(names_for_type_checkers(tree)) == sorted(module.__all__)
    assert sorted(lazy_homes(tree)) == sorted(module.__all__)
    assert dir(module) == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_and_users_get_a_name_from_the_same_module(package: str) -> None:
    tree = tree_of(package)
    assert homes_for_type_checkers(package, tree) == lazy_homes(tree)


def test_list_backends_is_no_package() -> None:
    import attnplug
    import attnplug.backends.torch_native

    assert attnplug.list_backends() == attnplug.registry.list_backends()
    assert "TORCH" in attnplug.list_backends()
    assert not callable(attnplug.backends)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_can_be_had_and_is_kept(package: str) -> None:
    module = importlib.import_module(package)
    for name, home in lazy_homes(tree_of(package)).items():
        value = getattr(module, name)
        assert vars(module)[name] is value
        source = importlib.import_module(f"{package}.{home or name}")
        assert value is (getattr(source, name) if home else source)


@pytest.mark.parametrize("package", PACKAGES)
def test_another_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'colour'"):
        importlib.import_module(package).colour  # noqa: B018


def test_a_submodule_can_be_exported_by_its_own_name() -> None:
    load, names, exported = lazy_exports("attnplug.core", {"": "errors", "spec": "LayerSpec"})
    assert load("errors") is importlib.import_module("attnplug.core.errors")
    assert names() == exported == ["LayerSpec", "errors"]
