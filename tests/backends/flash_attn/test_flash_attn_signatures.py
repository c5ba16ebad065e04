"""Our calls fit the libraries' recorded signatures, and those fit the libraries where they are installed."""

from __future__ import annotations

import importlib
import inspect

import flash_attn_2_fakes
import flash_attn_fakes
import pytest
from flash_attn_signatures import RECORDED

from attnplug.backends.flash_attn import fa2, fa3, fa4


def signature(name: str) -> inspect.Signature:
    made: dict[str, object] = {}
    exec(f"def recorded({RECORDED[name]}): ...", made)
    return inspect.signature(made["recorded"])


@pytest.mark.parametrize("version", ["4.0.0b26", "4.0.0b36"])
def test_what_flash_attn_4_is_given_binds(version):
    found = signature(f"flash_attn_4 {version} _flash_attn_fwd")
    found.bind(**dict.fromkeys(fa4.FORWARD))
    assert set(inspect.signature(flash_attn_fakes._flash_attn_fwd).parameters) >= set(found.parameters)


def test_the_positions_that_flash_attn_2_is_given_are_those_of_its_extension():
    assert len(inspect.signature(flash_attn_2_fakes.varlen_fwd).parameters) == len(fa2.VARLEN_FWD)
    told = set(signature("flash_attn 2.8.3 _flash_attn_varlen_forward").parameters)
    names = {"dropout_p": "p_dropout", "causal": "is_causal"}
    # The wrapper leaves out the output and the generator.
    assert {names.get(each, each) for each in told} == set(fa2.VARLEN_FWD) - {"out", "gen"}


def test_the_positions_of_decodes_that_flash_attn_2_is_given_are_those_of_its_extension():
    taken = [name.rstrip("_") for name in inspect.signature(flash_attn_2_fakes.fwd_kvcache).parameters]
    assert taken == list(fa2.FWD_KVCACHE)
    told = set(signature("flash_attn 2.8.3 flash_attn_with_kvcache").parameters)
    names = {
        "k_cache": "kcache",
        "v_cache": "vcache",
        "cache_seqlens": "seqlens_k",
        "causal": "is_causal",
        "cache_leftpad": "leftpad_k",
        "rotary_interleaved": "is_rotary_interleaved",
    }
    # The wrapper gives the window as a pair, and no output.
    given = {names.get(each, each) for each in told} - {"window_size", "return_softmax_lse"}
    assert given | {"window_size_left", "window_size_right", "out"} == set(fa2.FWD_KVCACHE)


def test_what_flash_attn_3_is_given_is_in_the_operators_schemas():
    for names, schema in ((fa3.FWD, flash_attn_fakes.FA3_FWD), (fa3.SCHEDULE, flash_attn_fakes.FA3_SCHEDULE)):
        declared = {part.partition("=")[0].split()[-1] for part in schema.partition("(")[2].split(", ")}
        assert set(names) <= declared


@pytest.mark.parametrize(
    ("module", "function", "recorded"),
    [
        (
            "flash_attn.flash_attn_interface",
            "flash_attn_varlen_func",
            "flash_attn 2.8.3 flash_attn_varlen_func",
        ),
        (
            "flash_attn.flash_attn_interface",
            "flash_attn_with_kvcache",
            "flash_attn 2.8.3 flash_attn_with_kvcache",
        ),
        (
            "flash_attn_interface",
            "flash_attn_varlen_func",
            "flash_attn_3 3.0.0b1 flash_attn_varlen_func",
        ),
        (
            "flash_attn_interface",
            "flash_attn_with_kvcache",
            "flash_attn_3 3.0.0b1 flash_attn_with_kvcache",
        ),
        ("flash_attn.cute.interface", "_flash_attn_fwd", "flash_attn_4 4.0.0b36 _flash_attn_fwd"),
    ],
)
def test_the_recorded_signature_is_the_real_one(module, function, recorded):
    pytest.importorskip(module, exc_type=ImportError)
    real = inspect.signature(getattr(importlib.import_module(module), function))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in real.parameters.values()]
    kept, told = list(signature(recorded).parameters.values()), [each.name for each in bare]
    assert told[: len(kept)] == [each.name for each in kept], "an argument was added, moved or removed"
    assert all(each.default is not inspect.Parameter.empty for each in bare[len(kept) :])
