"""Words of stored keys and values as halves for tensor cores, by few instructions: the loop has hardly any others.

A thread gets the halves that its lanes of the operand need, in an order that costs no exchange. Bytes are widened by moving
bits where that is exact: an integer of up to 10 bits is a float16 below the normal ones, and E2M1 and E5M2 are parts of one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_TWO = gl.constexpr((gl.float16,) * 2)
_FOUR = gl.constexpr((gl.float16,) * 4)
_EIGHT = gl.constexpr((gl.float16,) * 8)
_SIXTEEN = gl.constexpr((gl.float16,) * 16)


def _assembly(registers: str, *lines: str) -> gl.constexpr:
    return gl.constexpr("{ .reg .b32 " + registers + "; .reg .b16 l, h; " + " ".join(lines) + " }")


def _out(pair: int, register: str = "r") -> str:
    """The line that gives two halves of a register to outputs `2 * pair` and the next."""
    return f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, {register};"


def _fp4(source: str, pair: int, moved: str) -> str:
    """Two E2M1 codes in the upper bytes of halves, the left ones of their bytes after `moved`."""
    sign = {"shl.b32 t, {}, 1;": "shl.b32 s, {}, 4; and.b32 s, s, 0x80008000;"}.get(
        moved, "and.b32 s, {}, 0x80008000;"
    )
    return " ".join(
        (moved.format(source), sign.format(source), "lop3.b32 r, t, 0x0E000E00, s, 0xEA;", _out(pair))
    )


_LOW, _HIGH = "shl.b32 t, {}, 1;", "shr.b32 t, {}, 3;"
_PAIRS = ("0x4400", "0x5511", "0x6622", "0x7733")
"""prmt's selections of byte j of two words, twice each."""

_K_E4M3 = _assembly(
    "r",
    "mov.b32 {l, h}, $4;",
    *(f"cvt.rn.f16x2.e4m3x2 r, {half}; {_out(pair)}" for pair, half in enumerate("lh")),
)
_V_E4M3 = _assembly(
    "x, y, r",
    "prmt.b32 x, $8, $9, 0x5140; prmt.b32 y, $8, $9, 0x7362;",
    *(
        f"mov.b32 {{l, h}}, {word}; cvt.rn.f16x2.e4m3x2 r, l; {_out(2 * at)}"
        f" cvt.rn.f16x2.e4m3x2 r, h; {_out(2 * at + 1)}"
        for at, word in enumerate("xy")
    ),
)
_K_E5M2 = _assembly(
    "r", *(f"prmt.b32 r, $4, 0, {each}; {_out(pair)}" for pair, each in enumerate(("0x1404", "0x3424")))
)
_V_E5M2 = _assembly(
    "r",
    *(
        f"prmt.b32 r, $8, $9, {each}; and.b32 r, r, 0xFF00FF00; {_out(pair)}"
        for pair, each in enumerate(_PAIRS)
    ),
)
# The integer plus 128, of 8 bits: times 2**-24.
_K_INT8 = _assembly(
    "x, r",
    "xor.b32 x, $4, 0x80808080;",
    *(f"prmt.b32 r, x, 0, {each}; {_out(pair)}" for pair, each in enumerate(("0x4140", "0x4342"))),
)
# 1024 and the integer plus 128, less 1152.
_V_INT8 = _assembly(
    "a, b, r, o",
    "xor.b32 a, $8, 0x80808080; xor.b32 b, $9, 0x80808080; mov.b32 o, 0x64806480;",
    *(
        f"prmt.b32 r, a, b, {each}; lop3.b32 r, r, 0x00FF00FF, 0x64006400, 0xEA; sub.f16x2 r, r, o; {_out(pair)}"
        for pair, each in enumerate(_PAIRS)
    ),
)
_K_NVFP4 = _assembly(
    "p, q, t, s, r",
    "prmt.b32 p, $8, 0, 0x1404; prmt.b32 q, $8, 0, 0x3424;",
    *(
        _fp4(word, pair, moved)
        for pair, (word, moved) in enumerate((word, moved) for moved in (_LOW, _HIGH) for word in "pq")
    ),
)
_V_NVFP4 = _assembly(
    "p, t, s, r",
    *(
        f"prmt.b32 p, $16, $17, {each}; {_fp4('p', pair, _LOW)} {_fp4('p', pair + 4, _HIGH)}"
        for pair, each in enumerate(_PAIRS)
    ),
)
# Codes times 2**-24, and those of the high halves times 2**-20; bytes 0 and 2 come first, then 1 and 3.
_K_ROTATED4 = _assembly(
    "t, r",
    "shr.b32 t, $8, 8;",
    *(
        f"and.b32 r, {word}, {mask}; {_out(pair)}"
        for pair, (word, mask) in enumerate(
            (word, mask) for mask in ("0x000F000F", "0x00F000F0") for word in ("$8", "t")
        )
    ),
)
# Codes less 7.5, times 2**-9.
_V_ROTATED4 = _assembly(
    "p, r, m, n, o",
    "mov.b32 m, 0x78007800; mov.b32 n, 0x68006800; mov.b32 o, 0xA380A380;",
    *(
        f"prmt.b32 p, $16, $17, {each};"
        f" and.b32 r, p, 0x000F000F; fma.rn.f16x2 r, r, m, o; {_out(pair)}"
        f" and.b32 r, p, 0x00F000F0; fma.rn.f16x2 r, r, n, o; {_out(pair + 4)}"
        for pair, each in enumerate(_PAIRS)
    ),
)
_K_BYTES = gl.constexpr(",".join(["=h"] * 4 + ["r"]))
_K_PACKED = gl.constexpr(",".join(["=h"] * 8 + ["r"]))
_V_BYTES = gl.constexpr(",".join(["=h"] * 8 + ["r", "r"]))
_V_PACKED = gl.constexpr(",".join(["=h"] * 16 + ["r", "r"]))


@gluon.jit
def open_keys(words, NAME: gl.constexpr):
    """The bytes of each word as four halves; of two elements in a byte, the four low ones and then the four high ones."""
    if NAME == "fp8_e4m3":
        return gl.inline_asm_elementwise(_K_E4M3, _K_BYTES, [words], _FOUR, True, 1)
    elif NAME == "fp8_e5m2":
        return gl.inline_asm_elementwise(_K_E5M2, _K_BYTES, [words], _FOUR, True, 1)
    elif NAME == "int8_token_head":
        return gl.inline_asm_elementwise(_K_INT8, _K_BYTES, [words], _FOUR, True, 1)
    elif NAME == "nvfp4":
        return gl.inline_asm_elementwise(_K_NVFP4, _K_PACKED, [words], _EIGHT, True, 1)
    else:
        return gl.inline_asm_elementwise(_K_ROTATED4, _K_PACKED, [words], _EIGHT, True, 1)


@gluon.jit
def open_values(even, odd, NAME: gl.constexpr):
    """For each byte of two words, of an even token and the next, both halves; low ones first as in open_keys."""
    if NAME == "fp8_e4m3":
        return gl.inline_asm_elementwise(_V_E4M3, _V_BYTES, [even, odd], _EIGHT, True, 1)
    elif NAME == "fp8_e5m2":
        return gl.inline_asm_elementwise(_V_E5M2, _V_BYTES, [even, odd], _EIGHT, True, 1)
    elif NAME == "int8_token_head":
        return gl.inline_asm_elementwise(_V_INT8, _V_BYTES, [even, odd], _EIGHT, True, 1)
    elif NAME == "nvfp4":
        return gl.inline_asm_elementwise(_V_NVFP4, _V_PACKED, [even, odd], _SIXTEEN, True, 1)
    else:
        return gl.inline_asm_elementwise(_V_ROTATED4, _V_PACKED, [even, odd], _SIXTEEN, True, 1)


# E4M3 moved by 7 bits is float16 times 2**-8; times 2**13 it is 2**5 of the scale, and exact with E2M1 times 2**-14.
def _block_scale(at: int, moved: str) -> str:
    return f"{moved} and.b32 r, r, 0x7F80; mov.b32 {{l, h}}, r; mul.rn.f16 ${at}, l, c;"


_SHIFTS = ("shl.b32 r, ${}, 7;", "shr.u32 r, ${}, 1;", "shr.u32 r, ${}, 9;", "shr.u32 r, ${}, 17;")


def _block_scales(count: int) -> gl.constexpr:
    lines = (_block_scale(at, _SHIFTS[at].format(count)) for at in range(count))
    text = "{ .reg .b32 r; .reg .b16 l, h, c; mov.b16 c, 0x7000; " + " ".join(lines) + " }"
    return gl.constexpr(text)


_ONE_SCALE, _TWO_SCALES, _FOUR_SCALES = _block_scales(1), _block_scales(2), _block_scales(4)


@gluon.jit
def block_scales(stored, COUNT: gl.constexpr):
    """The COUNT scales of E4M3 in each integer as halves of 2**5 times what they are, in last dimensions of their own."""
    if COUNT == 1:
        return gl.inline_asm_elementwise(_ONE_SCALE, "=h,r", [stored], gl.float16, True, 1)
    elif COUNT == 2:
        one, other = gl.inline_asm_elementwise(_TWO_SCALES, "=h,=h,r", [stored], _TWO, True, 1)
        return gl.join(one, other)
    else:
        a, b, c, d = gl.inline_asm_elementwise(_FOUR_SCALES, "=h,=h,=h,=h,r", [stored], _FOUR, True, 1)
        return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def log2(x):
    """By the GPU's approximation, for numbers that are not below the normal ones."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, True, 1)


@gluon.jit
def keep_above(numbers):
    """The int32 numbers, one of a thread; no load before it is moved behind it."""
    return gl.inline_asm_elementwise(
        "membar.cta; mov.b32 $0, $1;", "=r,r", [numbers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def turn(weights):
    """Each 8 x 8 block of halves transposed across the warp: what a product gives, as what the next one takes."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        [weights],
        dtype=gl.float16,
        is_pure=False,
        pack=2,
    )
