"""Who a plugin is: its distribution decides, and no name that a plugin can choose freely stands in for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_plugins import CPU, SPEC

from attnplug import Registry
from attnplug.errors import PluginError, PolicyError, UnknownBackendError
from attnplug.registry import PluginStatus
from attnplug.registry.plugins.discovery import installed_plugins

pytestmark = pytest.mark.attack("identity")

MODULE = """
from attnplug import hookimpl
from attnplug.backends.torch_native.backend import TorchBackend
ATTNPLUG_API = (1, 1)

class Twin(TorchBackend):
    @staticmethod
    def get_name():
        return "{backend}"

    @classmethod
    def get_priority(cls, spec, device, phase):
        return {priority}

@hookimpl
def attnplug_backends():
    return [Twin]

@hookimpl
def attnplug_rank(spec, device, phase, candidates):
    return ["{backend}"]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(
    site: Path,
    name: str,
    points: str,
    version: str = "1.0",
    folder: str | None = None,
    info: str = "dist-info",
    encoding: str = "utf-8",
) -> None:
    path = site / f"{folder or name}-{version}.{info}"
    path.mkdir(parents=True)
    file = "METADATA" if info == "dist-info" else "PKG-INFO"
    (path / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding=encoding)
    (path / "entry_points.txt").write_text(f"[attnplug.backends]\n{points}\n", encoding=encoding)


def module(site: Path, name: str, backend: str = "TWIN", priority: int = 100) -> None:
    (site / f"{name}.py").write_text(MODULE.format(backend=backend, priority=priority))


@pytest.fixture
def hijack(site: Path) -> Path:
    """The distribution `honest`, and one called `evil` whose entry point is called `honest`."""
    module(site, "identity_honest")
    module(site, "identity_evil", priority=900)
    install(site, "honest", "main = identity_honest")
    install(site, "evil", "honest = identity_evil")
    return site


def test_at_means_the_distribution(hijack: Path) -> None:
    registry = Registry()
    decision = registry.explain(SPEC, CPU, backend="TWIN@honest")
    assert decision.chosen is not None
    assert decision.chosen.distribution == "honest"
    assert registry.explain(SPEC, CPU, backend="TWIN@evil").chosen.distribution == "evil"
    with pytest.raises(UnknownBackendError):
        registry.explain(SPEC, CPU, backend="TWIN@main")


@pytest.mark.parametrize("variable", ["ATTNPLUG_PLUGINS", "ATTNPLUG_RANK", "ATTNPLUG_BLOCK_PLUGINS"])
def test_a_name_of_two_distributions_is_an_error(
    variable: str, hijack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "honest")
    with pytest.raises(PolicyError) as error:
        Registry()
    text = f"{variable}='honest' names plugins of two distributions; write evil:honest or honest:main"
    assert str(error.value) == text
    monkeypatch.setenv(variable, "honest:main")
    records = {record.name: record.status for record in Registry().records}
    loaded = {"ATTNPLUG_PLUGINS": (False, True), "ATTNPLUG_BLOCK_PLUGINS": (True, False)}.get(variable)
    if loaded is not None:
        found = tuple(records[name] is PluginStatus.LOADED for name in ("evil:honest", "honest:main"))
        assert found == loaded


def test_only_a_module_of_attnplug_is_built_in(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata that say `Name: attnplug` pass neither the allow list nor the reserved names."""
    module(site, "identity_fake", backend="TORCH", priority=900)
    install(site, "attnplug", "fake = identity_fake\ntorch = identity_fake", version="9.9")
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "")
    found = {each.record.name: each for each in installed_plugins()}
    assert not found["attnplug:fake"].is_builtin
    assert found["attnplug:fake"].entry_point is None
    reason = str(found["attnplug:fake"].record.reason)
    assert "calls itself attnplug, but its module is identity_fake" in reason
    # It comes first on the path, and hides none of attnplug's own.
    assert found["attnplug:torch"].is_builtin
    chosen = Registry().explain(SPEC, CPU).chosen
    assert chosen is not None
    assert chosen.version != "9.9"


def test_a_plugin_installed_for_development_has_its_name(site: Path) -> None:
    module(site, "identity_one", backend="ONE")
    module(site, "identity_two", backend="TWO")
    install(site, "first-dist", "main = identity_one", info="egg-info")
    install(site, "second-dist", "main = identity_two", info="egg-info")
    records = {record.name: record for record in Registry().records}
    assert records["first-dist:main"].backends == ("ONE",)
    assert records["second-dist:main"].backends == ("TWO",)
    assert records["second-dist:main"].version == "1.0"


def test_the_first_on_the_path_is_the_distribution_installed(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older copy further down the path would add the entry points that it had."""
    first, later = site / "first", site / "later"
    for folder in (later, first):
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))
    module(site, "identity_new", backend="NEW")
    install(first, "same-dist", "new = identity_new", version="2.0")
    install(later, "Same_Dist", "old = identity_new\nnew = identity_new", version="1.0")
    names = [each.record.name for each in installed_plugins() if "same" in each.record.name.lower()]
    assert names == ["same-dist:new"]
    assert [r.version for r in Registry().records if r.name == "same-dist:new"] == ["2.0"]


def test_an_entry_points_file_that_is_no_utf8_leaves_a_trace(site: Path) -> None:
    install(site, "latin", "caf\xe9 = identity_none", encoding="latin-1")
    (record,) = [record for record in Registry().records if record.distribution == "latin"]
    assert record.status is PluginStatus.BROKEN
    assert "cannot be read: UnicodeDecodeError" in str(record.reason)


@pytest.mark.parametrize("point", ["main\u202e = identity_none", "main = identity_none\x1b[2J"])
def test_names_with_characters_that_no_name_has_are_not_run(point: str, site: Path) -> None:
    install(site, "odd", point)
    (record,) = [record for record in Registry().records if record.distribution == "odd"]
    assert record.status is PluginStatus.BROKEN
    assert "characters in its names that no name may have" in str(record.reason)


def test_a_plugin_under_strict_mode_must_have_a_true_name(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(site, "identity_fake", backend="MINE")
    install(site, "attnplug", "fake = identity_fake", version="9.9")
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")
    with pytest.raises(PluginError, match="calls itself attnplug"):
        Registry()
