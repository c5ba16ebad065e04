"""Each code has help, and the sentences that the help shows are those that attnplug gives."""

from __future__ import annotations

import doctest
import types

import pytest

import attnplug
from attnplug.core import SparseSpec
from attnplug.core.device import Device
from attnplug.core.reasons import REASON_CODES, REASON_HELP, Reason
from attnplug.core.spec import LayerSpec
from attnplug.registry.plugins.installed import missing_requirements
from attnplug.registry.selection.gates import conflicting, fault

SPEC = LayerSpec(num_heads=8, num_kv_heads=8, head_size=128)
ASKED = {
    "head_size": ("FLASHINFER", SPEC.replace(head_size=80), "sm90"),
    "dtype": ("FLASHINFER", SPEC.replace(dtype="float32"), "sm90"),
    "kv_cache_dtype": ("FLASH_ATTN_3", SPEC.replace(kv_cache_dtype="fp8"), "sm90"),
    "block_size": ("FLASH_ATTN_2", SPEC.replace(block_size=16), "sm90"),
    "sink": ("FLASH_ATTN_2", SPEC.replace(has_sinks=True), "sm90"),
    "sparse": ("TRITON", SPEC.replace(sparse=SparseSpec("token_topk", 2048)), "sm90"),
    "mm_prefix": ("FLASHINFER", SPEC.replace(mm_prefix=True), "sm90"),
    "compute_capability": ("TRITON", SPEC, "sm75"),
    "device_type": ("FLASHINFER", SPEC, "cpu"),
    "attn_type": ("FLASHINFER", SPEC.replace(attn_type="encoder_only", direct_kv=True), "sm90"),
    "combination": ("TRITON", SPEC.replace(kv_cache_dtype="fp8"), "sm80"),
    "feature": ("FLASHINFER", SPEC.replace(has_alibi=True), "sm90"),
}


def shows(code: str, reason: Reason | str) -> bool:
    return doctest.OutputChecker().check_output(REASON_HELP[code].seen, str(reason), doctest.ELLIPSIS)


def test_each_code_has_help_in_the_order_of_the_codes() -> None:
    assert tuple(REASON_HELP) == REASON_CODES
    assert all(each.seen and each.why.endswith(".") and each.steps for each in REASON_HELP.values())


@pytest.mark.parametrize("code", ASKED)
def test_a_shown_sentence_is_one_that_a_backend_gives(code: str) -> None:
    name, spec, device = ASKED[code]
    reasons = attnplug.list_backends()[name].validate_configuration(spec, Device.parse(device))
    found = [each for each in reasons if each.code.partition(".")[0] == code]
    assert [str(each) for each in found if shows(code, each)], found


def test_a_shown_sentence_of_a_library_is_one_of_the_gate() -> None:
    (missing,) = missing_requirements(["flash-attn<3,>=2.7"], ())
    assert (missing.code, shows("not_installed", missing)) == ("not_installed", True)
    (old,) = missing_requirements(["triton>=3.6"], (("triton", "3.0"),))
    assert (old.code, shows("version", old)) == ("version", True)


def test_a_shown_sentence_of_a_plugin_is_one_of_the_gate() -> None:
    offer = types.SimpleNamespace(name="ACME", full_name="ACME@one", distribution="one", version="1")
    rivals = [types.SimpleNamespace(full_name=name) for name in ("ACME@one", "ACME@two")]
    (reason,) = conflicting(offer, rivals).reasons  # type: ignore[arg-type]
    assert (reason.code, shows("conflict", reason)) == ("conflict", True)
    backend = type("AcmeBackend", (), {"__module__": "acme"})
    reason = fault(backend, "raised ValueError in get_priority")  # type: ignore[arg-type]
    assert (reason.code, shows("plugin_error", reason)) == ("plugin_error", True)
