"""`declare`: what a class says of each cell, as a Run."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from design_backends import backend_of

import attnplug
from attnplug.core.device import Device
from attnplug.core.errors import SpecError
from attnplug.matrix.axes import LATENT, phase_of, spec_of
from attnplug.matrix.design import declare, design, source_commit
from attnplug.matrix.model import Cell, Finding, Run, Status
from attnplug.matrix.summary import prefix_rows, summarise
from attnplug.registry.default import get_registry
from attnplug.testing.design.search import BLOCK_SIZES, HEAD_SIZES

BACKENDS = ("TORCH", "TRITON", "FLASH_ATTN_2", "FLASH_ATTN_4", "FLASHINFER")


def why(run: Run) -> dict[Cell, tuple[str, ...]]:
    return {finding.cell: finding.why for finding in run.findings}


@pytest.mark.parametrize("device", ["sm80", "sm90", "sm100", "rocm:9.4", "cpu"])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_cell_is_answered_as_the_class_answers_its_layer(name: str, device: str) -> None:
    backend = get_registry().backends()[name]
    run = declare(backend, device)
    assert [finding.cell for finding in run.findings] == design(backend, Device.parse(device))
    for finding in run.findings:
        asked = (spec_of(finding.cell), Device.parse(device), phase_of(finding.cell))
        assert list(finding.why) == backend.validate_configuration(*asked)
        assert finding.status is (Status.REFUSED if finding.why else Status.DECLARED)


def test_the_order_of_cells_is_that_of_the_axes_with_sizes_ascending() -> None:
    run = declare(get_registry().backends()["TORCH"], "cpu")
    ids = [finding.cell.id for finding in run.findings]
    assert ids[:2] == ["plain/mixed/d16/bfloat16/auto/b1/NHD", "plain/mixed/d16/bfloat16/auto/b8/NHD"]
    assert [each for each in ids if each.startswith("encoder/")][-1].startswith("encoder/prefill/d320/")
    assert ids[-1].startswith("state_checkpoints/")


def test_a_run_says_whose_it_is_and_that_nothing_was_looked_up() -> None:
    offer = next(offer for offer in get_registry().plugins.offers if offer.name == "TORCH")
    run = declare(offer, "sm90")
    assert (run.backend, run.distribution, run.version) == ("TORCH", "attnplug", offer.version)
    assert (run.device, run.device_name, run.versions) == ("sm90", None, {})
    made = dt.datetime.fromisoformat(run.date)
    assert made.utcoffset() == dt.timedelta(0)
    assert made.microsecond == 0


def test_a_class_alone_has_no_distribution() -> None:
    run = declare(backend_of(), Device("cuda", (9, 0), "NVIDIA H200"))
    assert (run.backend, run.distribution, run.version) == ("DESIGNED", None, None)
    assert run.device == "sm90"


def test_what_is_not_installed_is_declared_all_the_same() -> None:
    run = declare(backend_of(requires=("no-such-distribution>=1",)), "cpu")
    assert any(finding.status is Status.DECLARED for finding in run.findings)


def test_a_device_that_it_does_not_run_on_has_every_cell_refused_for_it() -> None:
    reasons = why(declare(get_registry().backends()["FLASH_ATTN_2"], "cpu"))
    assert all(any("device type not supported" in reason for reason in found) for found in reasons.values())
    plain = Cell("plain", "mixed", 64, "bfloat16", "auto", 256, "NHD")
    assert reasons[plain] == ("device type not supported: cpu is not cuda",)


def test_a_layout_that_is_not_read_is_refused() -> None:
    reasons = why(declare(backend_of(layouts=("HND",)), "cpu"))
    assert reasons[Cell("plain", "mixed", 128, "bfloat16", "auto", 16, "NHD")] == (
        "KV layout not supported: NHD is not HND",
    )
    assert not reasons[Cell("plain", "mixed", 128, "bfloat16", "auto", 16, "HND")]


def test_text_that_names_no_device_is_an_error() -> None:
    with pytest.raises(SpecError, match="is unknown"):
        declare(backend_of(), "sm_ninety")


def _raises(*args: Any) -> Any:
    raise RuntimeError("not today")


@pytest.mark.parametrize(
    "door",
    [
        "validate_configuration",
        "supported_kv_cache_layouts",
        "get_supported_head_sizes",
        "get_supported_kernel_block_sizes",
        "supports_combination",
        "is_mla",
    ],
)
def test_what_a_backend_raises_is_a_reason_against_it(door: str) -> None:
    backend = backend_of()
    setattr(backend, door, classmethod(_raises))
    run = declare(backend, "cpu")
    assert run.findings
    paged = [finding for finding in run.findings if finding.cell.layout is not None]
    assert all(finding.status is Status.REFUSED for finding in paged)
    assert all("RuntimeError: not today" in "; ".join(finding.why) for finding in paged)


@pytest.mark.parametrize(
    "declared",
    [
        {"supported_dtypes": 5},
        {"supported_kv_cache_dtypes": (5,)},
        {"get_preferred_block_size": classmethod(_raises)},
        {"head_sizes": (True, "64", -8, 0)},
        {"block_sizes": ("16",)},
        {"layouts": (None, 3)},
        {"supported_dtypes": ("float64", "bfloat16")},
    ],
)
def test_declarations_that_mean_nothing_add_no_values(declared: dict[str, Any]) -> None:
    cells = {finding.cell for finding in declare(backend_of(**declared), "cpu").findings}
    assert {cell.head_size for cell in cells} == {*HEAD_SIZES, LATENT}
    assert {cell.dtype for cell in cells} == {"bfloat16", "float16", "float32"}
    assert {cell.kv_cache_dtype for cell in cells} == {"auto", "fp8_e4m3", "fp8_e5m2"}
    assert {cell.block_size for cell in cells} == {None, *BLOCK_SIZES}
    assert {cell.layout for cell in cells} == {None, "NHD", "HND"}


def test_plain_sentences_are_reasons() -> None:
    backend = backend_of(validate_configuration=classmethod(lambda cls, *asked: ["too old"]))
    finding = declare(backend, "cpu").findings[0]
    assert finding == Finding(finding.cell, Status.REFUSED, ("too old",))


def test_torch_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from attnplug.matrix.design import declare\n"
        "from attnplug.registry.default import get_registry\n"
        "for offer in get_registry().plugins.offers: declare(offer, 'sm90'), declare(offer, 'cpu')\n"
        "print({'torch', 'triton', 'numpy', 'attnplug.testing.conformance', 'attnplug.testing.batches'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture
def fresh_commit() -> Any:
    source_commit.cache_clear()
    yield source_commit
    source_commit.cache_clear()


def test_the_commit_is_that_of_the_checkout(fresh_commit: Any) -> None:
    checkout = Path(attnplug.__file__).parents[1]
    if not (checkout / ".git").exists():
        assert fresh_commit() is None
    else:
        head = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        done = subprocess.run(head, capture_output=True, text=True, check=True)
        assert fresh_commit() == done.stdout.strip()


def _installed_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "attnplug"
    package.mkdir(parents=True)
    monkeypatch.setattr(attnplug, "__file__", str(package / "__init__.py"))


def test_an_installed_package_has_no_commit(
    fresh_commit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    _installed_in(tmp_path / "site-packages", monkeypatch)
    assert fresh_commit() is None


def test_a_checkout_that_git_cannot_read_has_no_commit(
    fresh_commit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").write_text("gitdir: /nowhere\n")
    _installed_in(tmp_path, monkeypatch)
    assert fresh_commit() is None


def test_without_git_there_is_no_commit(
    fresh_commit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    _installed_in(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fresh_commit() is None


def test_a_size_that_no_layer_has_is_refused_and_ends_no_matrix() -> None:
    sizes = (2**70 + 1, 64)
    torch: Any = get_registry().backends()["TORCH"]
    odd = type("Odd", (torch,), {"get_supported_head_sizes": classmethod(lambda cls: sizes)})
    found = declare(odd, "cpu").findings
    assert Status.DECLARED in {each.status for each in found if each.cell.head_size == 64}
    reasons = [why for each in found if each.cell.head_size > 2**70 for why in each.why]
    assert reasons
    assert all("declares a value of no layer" in why for why in reasons)


def test_a_run_says_whose_layers_share_prefixes_and_why_others_do_not() -> None:
    run = declare(get_registry().backends()["TORCH"], "cpu")
    assert run.prefixes["plain"] is None
    assert run.prefixes["alibi"] == "ALiBi: pieces of a prefix have no positions"
    assert run.prefixes.keys() == {
        each.cell.feature for each in run.findings if each.status is Status.DECLARED
    }
    rows = prefix_rows([summarise(run)])
    assert rows[0][0] == "TORCH"
    assert rows[0][1].startswith("plain, sliding window, ")
    assert ("TORCH", "ALiBi", "ALiBi: pieces of a prefix have no positions") in rows
