"""The script that reads the names of vLLM's base classes from its source."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import vllm_names

OLD = """
import torch_that_is_not_there

class AttentionBackend(ABC):
    accept_output_buffer: bool = False
    first = second = ()

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

class AttentionImpl(ABC, Generic[T]):
    scale: float

    def __new__(cls, *args):
        self.dcp_rank = 0
        self.dcp_world_size, other = 1, 2
        other.not_its_own = 3

class AttentionLayer(Protocol):
    not_a_name: int
"""
BUILDER = """
class AttentionMetadataBuilder(ABC):
    _cudagraph_support = 0

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.limits["a"] = vllm_config
"""


def sources(folder: Path, **releases: dict[str, str]) -> Path:
    for version, files in releases.items():
        for name, text in files.items():
            path = folder / f"vllm-{version[1:].replace('_', '.')}" / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the script writes, in place of the package's."""
    path = tmp_path / "vllm_names.py"
    monkeypatch.setattr(vllm_names, "TARGET", path)
    return path


def test_the_table_has_what_class_bodies_and_their_methods_set(tmp_path: Path, target: Path) -> None:
    new = OLD.replace("accept_output_buffer: bool = False", "def supports_all(cls): ...").replace(
        "class AttentionImpl(", "class MLAAttentionImpl(Unknown):\n    latent = 1\n\nclass AttentionImpl("
    )
    folder = sources(
        tmp_path / "sources",
        v0_9_2={"abstract.py": OLD, "v1/utils.py": BUILDER},
        v0_10_0={"backend.py": new + BUILDER},
    )
    assert vllm_names.main([str(folder)]) == 0
    table = runpy.run_path(str(target))
    assert table["VLLM_VERSIONS"] == ("0.9.2", "0.10.0")
    both = ("0.9.2", "0.10.0")
    assert table["VLLM_BACKEND_NAMES"] == {
        "accept_output_buffer": ("0.9.2", "0.9.2"),
        "first": both,
        "get_name": both,
        "second": both,
        "supports_all": ("0.10.0", "0.10.0"),
    }
    assert table["VLLM_IMPL_NAMES"] == {
        "dcp_rank": both,
        "dcp_world_size": both,
        "latent": ("0.10.0", "0.10.0"),
        "scale": both,
    }
    assert table["VLLM_BUILDER_NAMES"] == {"_cudagraph_support": both, "vllm_config": both}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (None, "usage: python ci/vllm_names.py FOLDER"),
        ({"abstract.py": OLD}, "no such class was found in 0.9.2: BUILDER; add its new name to CLASSES"),
    ],
)
def test_a_source_without_the_classes_is_named(
    files: dict[str, str] | None, told: str, tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path if files is None else sources(tmp_path, v0_9_2=files)
    assert vllm_names.main([str(folder)]) == 2
    assert told in capsys.readouterr().out
    assert not target.exists()


def test_the_table_of_the_package_was_made_by_it() -> None:
    text = vllm_names.TARGET.read_text()
    assert text.startswith(vllm_names._HEAD)
    found = runpy.run_path(str(vllm_names.TARGET))
    first, last = found["VLLM_VERSIONS"]
    releases: dict[str, dict[str, set[str]]] = {}
    for table in vllm_names.CLASSES:
        for name, ends in found[f"VLLM_{table}_NAMES"].items():
            assert vllm_names.order(first) <= vllm_names.order(ends[0]) <= vllm_names.order(ends[1])
            assert vllm_names.order(ends[1]) <= vllm_names.order(last)
            for version in ends:
                releases.setdefault(version, {each: set() for each in vllm_names.CLASSES})[table].add(name)
    count = text.partition("of the ")[2].partition(" ")[0]
    again = vllm_names.module_of(releases)
    assert again.replace(f"of the {len(releases)} releases", f"of the {count} releases") == text
