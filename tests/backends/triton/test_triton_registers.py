"""The decode loop in registers has right numbers: its assembly, addresses and arithmetic, emulated on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import ptx_emulation
from gluon_emulation import loaded, stand_ins
from register_cases import FORMATS, LIMITS, check, kept_launches
from register_emulation import PACKAGE, register_decode

from attnplug.backends.triton import bindings, registers
from attnplug.testing.drawn_values import Numbers

# Both kinds of scales; the others differ in how bytes are opened.
SOME = [
    "nvfp4",
    "int8_token_head",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8_e4m3", "fp8_e5m2", "rotated4")),
]
RAGGED = [1] * 5, [300, 1, 131, 64, 17]
DRAFTS = [3, 1, 2, 0, 3, 1], [200, 65, 64, 90, 130, 5]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What BoundLayer asks for, now that the loop runs here."""
    kernel = register_decode()
    monkeypatch.setattr(registers, "runs_registers", lambda *_: True)
    monkeypatch.setattr(bindings, "register_kernel", lambda: kernel)
    return kept_launches(monkeypatch)


@pytest.mark.parametrize("heads", [(8, 2, 128), (8, 2, 64), (16, 1, 128), (4, 2, 256), (3, 3, 128)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_groups_and_heads_of_all_sizes(name: str, heads: tuple[int, int, int], launches: list[Any]) -> None:
    check(name, heads, RAGGED, launches, block_size=64)


@pytest.mark.parametrize("limits", ["lse", *LIMITS])
@pytest.mark.parametrize("name", SOME)
def test_limits_of_keys_and_sinks(name: str, limits: str, launches: list[Any]) -> None:
    check(name, (8, 2, 128), RAGGED, launches, block_size=16, **LIMITS.get(limits, {"needs_lse": True}))


@pytest.mark.parametrize("name", SOME)
def test_drafts_have_16_rows(name: str, launches: list[Any]) -> None:
    check(name, (8, 2, 128), DRAFTS, launches, block_size=32)
    check(name, (8, 2, 64), DRAFTS, launches, block_size=16, sliding_window=100)


@pytest.mark.parametrize("name", SOME)
def test_float16_layers_in_pages_of_heads(name: str, launches: list[Any]) -> None:
    check(name, (8, 2, 128), RAGGED, launches, block_size=48, layout="HND", dtype="float16")


# Triton's interpreter takes maxima by numpy, which warns of rows of NaN where strangers are written.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("numbers", ["far", "sharp", "wide", "strangers"])
@pytest.mark.parametrize("name", SOME)
def test_large_and_peaked_numbers(name: str, numbers: str, launches: list[Any]) -> None:
    check(name, (8, 2, 128), RAGGED, launches, block_size=16, numbers=Numbers(numbers))


@pytest.mark.parametrize("times", [2.0**-100, 2.0**48, 2.0**100])
@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_queries_of_any_size_leave_no_row_without_numbers(
    name: str, times: float, launches: list[Any]
) -> None:
    check(name, (8, 2, 64), RAGGED, launches, times=times, block_size=32, needs_lse=True, has_sinks=True)


def _openings() -> Any:
    return loaded(PACKAGE, ("openings",), stand_ins())["openings"]


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_VALUES = torch.cat((_E2M1, -_E2M1)).double()


@pytest.mark.parametrize("of", ["keys", "values"])
def test_all_pairs_of_e2m1_codes_are_opened_exactly(of: str) -> None:
    opened, draw = _openings(), torch.Generator().manual_seed(0)
    # Every byte, beside others: what these leave behind must not show.
    words = [torch.randint(256, (4096, 4), generator=draw, dtype=torch.uint8) for _ in range(2)]
    for place in range(4):
        words[0][place * 256 : place * 256 + 256, place] = torch.arange(256, dtype=torch.uint8)
    count = 1 if of == "keys" else 2
    text, form = (opened._K_NVFP4, opened._K_MOVED) if count == 1 else (opened._V_NVFP4, opened._V_MOVED)
    given = [each.view(torch.int32).flatten() for each in words[:count]]
    powers = [torch.tensor(power, dtype=torch.int32) for power in (512, 32, 2)]
    found = ptx_emulation.run(text, form, given + powers, (torch.float16,) * (8 * count))
    order = [0, 2, 1, 3] if count == 1 else [0, 1, 2, 3]
    for shift in (0, 4):
        for at, byte in enumerate(order):
            for token, word in enumerate(words[:count]):
                half = found[count * (at + shift) + token].double() * 2.0**14
                want = _VALUES[(word[:, byte] >> shift & 15).long()]
                assert torch.equal(half, want)
                assert torch.equal(half.signbit(), want.signbit())


@pytest.mark.parametrize("form", ["_K_SCALE", "_K_SCALES_2", "_K_SCALES_4", "_V_SCALE", "_V_SCALES_2"])
def test_all_scales_of_blocks_are_opened_exactly(form: str) -> None:
    codes = torch.arange(127, dtype=torch.uint8)
    count = {"4": 4, "2": 2}.get(form[-1], 1)
    both = form.startswith("_V")
    stored = torch.stack([codes.roll(at) for at in range(count)], -1)
    other = codes.flip(0)[:, None].expand(-1, count)
    narrow = form == "_K_SCALES_2"
    weights = torch.tensor([1 << 8 * at for at in range(count)], dtype=torch.int32)
    words = [(each.int() * weights).sum(-1, dtype=torch.int32) for each in (stored, other)[: 1 + both]]
    given = [each.short() if narrow else each for each in words]
    names = ",".join(["=h"] * (count * (1 + both)) + ["h" if narrow else "r"] * len(given))
    found = ptx_emulation.run(
        getattr(_openings(), form), names, given, (torch.float16,) * (count * (1 + both))
    )
    for at in range(count):
        for token, each in enumerate((stored, other)[: 1 + both]):
            want = each[:, at].contiguous().view(torch.float8_e4m3fn).double() * 32
            assert torch.equal(found[at * (1 + both) + token].double(), want)
