"""Which library an import would run: the one required, a stale one, none, or one that crashes."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import sys
from pathlib import Path

import pytest

from attnplug.backends.flash_attn import (
    FlashAttn2Backend,
    FlashAttn3Backend,
    FlashAttn4Backend,
    fa4,
)
from attnplug.backends.flash_attn.impl import FlashAttnImpl
from attnplug.errors import BackendUnavailableError
from attnplug.registry.selection.gates import import_parts

FORWARD = f"def _flash_attn_fwd({', '.join(fa4.FORWARD)}): ...\n"
CUTE = {"flash_attn/cute/__init__.py": "", "flash_attn/cute/interface.py": FORWARD}
CUDA = {
    "flash_attn/__init__.py": "import flash_attn_2_cuda\n",
    "flash_attn_2_cuda.py": "def varlen_fwd(): ...\ndef fwd_kvcache(): ...\n",
}


class Site:
    """A folder of installed distributions, first on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, version: str, files: dict[str, str], *, recorded: bool = True) -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for path, text in files.items():
            self.write(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(text)}\n")
        if recorded:
            (info / "RECORD").write_text("".join(lines))
        importlib.invalidate_caches()

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def _forget() -> None:
    libraries = {"flash_attn", "flash_attn_2_cuda", "flash_attn_3", "flash_attn_interface"}
    for name in [name for name in sys.modules if name.partition(".")[0] in libraries]:
        del sys.modules[name]
    FlashAttnImpl.kernels.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path, monkeypatch):
    _forget()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Site(tmp_path)
    _forget()


def refusal(backend):
    with pytest.raises(BackendUnavailableError) as caught:
        backend.get_impl_cls()
    (reason,) = import_parts(backend)
    assert reason.code == "import_failed"
    assert str(caught.value) in reason
    return str(caught.value)


def test_flash_attn_4_alone_is_imported_from_a_folder_without_init(site):
    site.install("flash-attn-4", "4.0.0b36", CUTE)
    assert FlashAttn4Backend.get_impl_cls() is fa4.FlashAttn4Impl
    assert import_parts(FlashAttn4Backend) == ()


def test_a_library_that_warns_when_it_is_imported_is_usable_where_warnings_are_errors(site):
    warned = "import warnings\nwarnings.warn('LayoutEnum moves', DeprecationWarning)\n"
    site.install("flash-attn-4", "4.0.0b36", {**CUTE, "flash_attn/cute/interface.py": warned + FORWARD})
    assert import_parts(FlashAttn4Backend) == ()


def test_both_generations_share_their_folder(site):
    site.install("flash-attn", "2.8.3", CUDA)
    site.install("flash-attn-4", "4.0.0b36", CUTE)
    assert import_parts(FlashAttn2Backend) == ()
    assert import_parts(FlashAttn4Backend) == ()


def test_a_stale_folder_written_over_the_one_required_is_refused(site):
    site.install("flash-attn-4", "4.0.0b36", CUTE)
    site.install("flash-attn", "2.8.3", {**CUDA, "flash_attn/cute/interface.py": "old = True\n"})
    told = refusal(FlashAttn4Backend)
    assert "is not the one of flash-attn-4 4.0.0b36: flash-attn 2.8.3 has written over it" in told
    assert "pip install --force-reinstall --no-deps 'flash-attn-4>=4.0.0b26,<5'" in told
    assert import_parts(FlashAttn2Backend) == ()


def test_a_stale_folder_in_front_of_the_one_required_is_refused(site, tmp_path_factory, monkeypatch):
    site.install("flash-attn-4", "4.0.0b36", CUTE)
    front = Site(tmp_path_factory.mktemp("front"))
    front.install("flash-attn", "2.8.3", {**CUDA, "flash_attn/cute/interface.py": "old = True\n"})
    monkeypatch.syspath_prepend(str(front.folder))
    assert "belongs to flash-attn 2.8.3, not to flash-attn-4 4.0.0b36" in refusal(FlashAttn4Backend)


def test_a_folder_that_nobody_installed_is_refused(site):
    site.install("flash-attn-4", "4.0.0b36", {"flash_attn_4_notice.txt": ""})
    site.write("flash_attn/cute/interface.py", FORWARD)
    assert "belongs to no installed" in refusal(FlashAttn4Backend)


def test_a_package_in_front_that_hides_the_submodule_is_named(site, tmp_path_factory, monkeypatch):
    site.install("flash-attn-4", "4.0.0b36", CUTE)
    front = Site(tmp_path_factory.mktemp("front"))
    front.install("flash-attn", "2.8.3", CUDA)
    monkeypatch.syspath_prepend(str(front.folder))
    told = refusal(FlashAttn4Backend)
    assert "flash_attn.cute.interface of flash-attn-4 4.0.0b36 is not where Python looks for it" in told
    assert f"the package comes from {front.folder / 'flash_attn'}" in told


def test_a_submodule_that_is_missing_is_told(site):
    site.install("flash-attn-3", "3.0.0b1", {"flash_attn_interface.py": ""})
    told = refusal(FlashAttn3Backend)
    assert "flash_attn_3._C of flash-attn-3 3.0.0b1 is not where Python looks for it; pip install" in told
    site.install("flash-attn", "2.8.3", {"flash_attn_2_cuda.py": "x = 1\n"})
    assert "flash_attn_2_cuda has no varlen_fwd" in refusal(FlashAttn2Backend)


def test_a_library_that_is_not_installed_is_told(site, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(site.folder)])
    assert "flash-attn-4 is not installed; pip install 'flash-attn-4" in refusal(FlashAttn4Backend)


def test_a_file_changed_by_hand_is_its_owners_business(site):
    site.install("flash-attn-4", "4.0.0b36", CUTE)
    site.write("flash_attn/cute/interface.py", FORWARD + "# patched\n")
    assert import_parts(FlashAttn4Backend) == ()


def test_an_installation_without_records_is_believed(site):
    site.install("flash-attn-4", "4.0.0b36", CUTE, recorded=False)
    assert import_parts(FlashAttn4Backend) == ()


@pytest.mark.parametrize(("editable", "served"), [(True, True), (False, False)])
def test_an_editable_installation_owns_what_lies_in_its_folder(site, editable, served):
    site.install("flash-attn-4", "4.0.0b36", {"flash_attn_4_notice.txt": ""})
    for path, text in CUTE.items():
        site.write(path, text)
    url = {"url": site.folder.as_uri(), "dir_info": {"editable": editable}}
    site.write("flash_attn_4-4.0.0b36.dist-info/direct_url.json", json.dumps(url))
    assert (import_parts(FlashAttn4Backend) == ()) is served


def test_an_import_that_raises_says_what_and_for_which_torch_to_build(site):
    site.install(
        "flash-attn", "2.8.3", {**CUDA, "flash_attn_2_cuda.py": "raise ImportError('undefined symbol: _Z')\n"}
    )
    told = refusal(FlashAttn2Backend)
    assert "importing flash_attn_2_cuda of flash-attn 2.8.3 raised ImportError: undefined symbol: _Z" in told
    assert "install a build of it for torch" in told


def test_a_broken_flash_attention_2_around_flash_attention_4_is_charged_to_the_former(site):
    site.install("flash-attn-4", "4.0.0b36", CUTE)
    site.install("flash-attn", "2.8.3", {"flash_attn/__init__.py": "raise ImportError('libcudart.so.12')\n"})
    told = refusal(FlashAttn4Backend)
    assert (
        "lies in the package flash_attn of flash-attn 2.8.3, which raised ImportError: libcudart.so.12"
        in told
    )
    assert "pip uninstall flash-attn" in told


def test_a_release_without_an_argument_that_is_given_is_refused(site):
    site.install(
        "flash-attn-4",
        "4.0.0b99",
        {**CUTE, "flash_attn/cute/interface.py": "def _flash_attn_fwd(q, k): ...\n"},
    )
    assert "_flash_attn_fwd does not take causal, cu_seqlens_k" in refusal(FlashAttn4Backend)


def test_a_release_without_the_function_is_refused(site):
    site.install("flash-attn-4", "4.0.0b99", {**CUTE, "flash_attn/cute/interface.py": ""})
    assert "has no _flash_attn_fwd; pip install" in refusal(FlashAttn4Backend)


def test_an_extension_with_another_number_of_arguments_is_refused(site):
    text = 'def varlen_fwd():\n    "varlen_fwd(arg0: torch.Tensor, arg1: torch.Tensor) -> list"\n'
    site.install("flash-attn", "2.9.0", {"flash_attn/__init__.py": "", "flash_attn_2_cuda.py": text})
    assert "varlen_fwd of flash_attn_2_cuda takes 2 arguments, not 21" in refusal(FlashAttn2Backend)


def test_an_extension_without_the_function_for_decodes_is_refused(site):
    text = "def varlen_fwd(): ...\n"
    site.install("flash-attn", "2.9.0", {"flash_attn/__init__.py": "", "flash_attn_2_cuda.py": text})
    assert "flash_attn_2_cuda has no fwd_kvcache; pip install" in refusal(FlashAttn2Backend)
