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


def _fp4(word: str, powers: tuple[str, str, str], even: int, odd: int, high: int) -> str:
    """E2M1 codes of a word's bytes as halves: those of bytes 0 and 2 are pair `even`, and those of 1 and 3 pair `odd`.

    The pairs of high codes come `high` later. A code with its magnitude in bits 9 to 11 of a half has its sign in bit 12: 7
    in bits 12 to 14 carries it to bit 15, and then these bits are cleared. Two codes are moved with one multiplication,
    as what others leave in lower bits is cleared too. Multiplications and logic have pipes of their own, of equal widths:
    the assembler has shifts for powers that it knows, so these are operands.
    """
    left_9, left_5, left_1 = powers
    moved = (
        f"and.b32 t, {word}, 0x0F0F0F0F;",
        f"mad.lo.u32 r, t, {left_9}, k; and.b32 r, r, 0x8E008E00; {_out(even)}",
        f"mad.lo.u32 r, t, {left_1}, k; and.b32 r, r, 0x8E008E00; {_out(odd)}",
        f"and.b32 t, {word}, 0xF0F0F0F0;",
        f"mad.lo.u32 r, t, {left_5}, k; and.b32 r, r, 0x8E008E00; {_out(even + high)}",
        f"shr.u32 t, t, 3; add.u32 r, t, k; and.b32 r, r, 0x8E008E00; {_out(odd + high)}",
    )
    return " ".join(moved)


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
_K_NVFP4 = _assembly("t, r, k", "mov.b32 k, 0x70007000;", _fp4("$8", ("$9", "$10", "$11"), 0, 1, 2))
_V_NVFP4 = _assembly(
    "p, t, r, k",
    "mov.b32 k, 0x70007000;",
    *(
        f"prmt.b32 p, $16, $17, {each}; {_fp4('p', ('$18', '$19', '$20'), 2 * at, 2 * at + 1, 4)}"
        for at, each in enumerate(("0x5410", "0x7632"))
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


def _constraints(halves: int, words: int) -> gl.constexpr:
    return gl.constexpr(",".join(["=h"] * halves + ["r"] * words))


_K_BYTES, _K_PACKED, _K_MOVED = _constraints(4, 1), _constraints(8, 1), _constraints(8, 4)
_V_BYTES, _V_PACKED, _V_MOVED = _constraints(8, 2), _constraints(16, 2), _constraints(16, 5)


@gluon.jit
def open_keys(words, one, NAME: gl.constexpr):
    """The bytes of each word as four halves; of two elements in a byte, the four low ones and then the four high ones."""
    if NAME == "fp8_e4m3":
        return gl.inline_asm_elementwise(_K_E4M3, _K_BYTES, [words], _FOUR, True, 1)
    elif NAME == "fp8_e5m2":
        return gl.inline_asm_elementwise(_K_E5M2, _K_BYTES, [words], _FOUR, True, 1)
    elif NAME == "int8_token_head":
        return gl.inline_asm_elementwise(_K_INT8, _K_BYTES, [words], _FOUR, True, 1)
    elif NAME == "nvfp4":
        return gl.inline_asm_elementwise(
            _K_NVFP4, _K_MOVED, [words, one * 512, one * 32, one * 2], _EIGHT, True, 1
        )
    else:
        return gl.inline_asm_elementwise(_K_ROTATED4, _K_PACKED, [words], _EIGHT, True, 1)


@gluon.jit
def open_values(even, odd, one, NAME: gl.constexpr):
    """For each byte of two words, of an even token and the next, both halves; low ones first as in open_keys."""
    if NAME == "fp8_e4m3":
        return gl.inline_asm_elementwise(_V_E4M3, _V_BYTES, [even, odd], _EIGHT, True, 1)
    elif NAME == "fp8_e5m2":
        return gl.inline_asm_elementwise(_V_E5M2, _V_BYTES, [even, odd], _EIGHT, True, 1)
    elif NAME == "int8_token_head":
        return gl.inline_asm_elementwise(_V_INT8, _V_BYTES, [even, odd], _EIGHT, True, 1)
    elif NAME == "nvfp4":
        return gl.inline_asm_elementwise(
            _V_NVFP4, _V_MOVED, [even, odd, one * 512, one * 32, one * 2], _SIXTEEN, True, 1
        )
    else:
        return gl.inline_asm_elementwise(_V_ROTATED4, _V_PACKED, [even, odd], _SIXTEEN, True, 1)


# E4M3 moved by 7 bits is float16 times 2**-8; times 2**13 it is 2**5 of the scale, and exact with E2M1 times 2**-14. Scales
# have no sign.
def _two_scales(first: str, second: str, chosen: str, at: int) -> str:
    """Two scales, moved to the upper bytes of halves, to outputs `2 * at` and the next."""
    return f"prmt.b32 r, {first}, {second}, {chosen}; shr.u32 r, r, 1; mul.rn.f16x2 r, r, c; {_out(at)}"


def _scales(*lines: str) -> gl.constexpr:
    return gl.constexpr("{ .reg .b32 r, c; mov.b32 c, 0x70007000; " + " ".join(lines) + " }")


_K_SCALE = _scales("shl.b32 r, $1, 7; mul.rn.f16x2 r, r, c; cvt.u16.u32 $0, r;")
_K_SCALES_2 = _scales("mov.b32 r, {$2, $2};", _two_scales("r", "0", "0x1404", 0))
_K_SCALES_4 = _scales(_two_scales("$4", "0", "0x1404", 0), _two_scales("$4", "0", "0x3424", 1))
_V_SCALE = _scales(_two_scales("$2", "$3", "0x4501", 0))
_V_SCALES_2 = _scales(_two_scales("$4", "$5", "0x4602", 0), _two_scales("$4", "$5", "0x5612", 1))


@gluon.jit
def key_scales(stored, COUNT: gl.constexpr):
    """The COUNT scales of E4M3 in each integer as halves of 2**5 times what they are, in last dimensions of their own."""
    if COUNT == 1:
        return gl.inline_asm_elementwise(_K_SCALE, "=h,r", [stored.to(gl.int32)], gl.float16, True, 1)
    elif COUNT == 2:
        one, other = gl.inline_asm_elementwise(_K_SCALES_2, "=h,=h,h", [stored], _TWO, True, 1)
        return gl.join(one, other)
    else:
        a, b, c, d = gl.inline_asm_elementwise(_K_SCALES_4, "=h,=h,=h,=h,r", [stored], _FOUR, True, 1)
        return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def value_scales(even, odd, COUNT: gl.constexpr):
    """The same of an even token and of the next."""
    if COUNT == 1:
        return gl.inline_asm_elementwise(_V_SCALE, "=h,=h,r,r", [even, odd], _TWO, True, 1)
    else:
        a, b, c, d = gl.inline_asm_elementwise(_V_SCALES_2, "=h,=h,=h,=h,r,r", [even, odd], _FOUR, True, 1)
        return gl.join(a, c), gl.join(b, d)


@gluon.jit
def log2(x):
    """By the GPU's approximation, for numbers that are not below the normal ones."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, True, 1)


@gluon.jit
def keep_above(numbers):
    """No load before it is moved behind it, nor one behind it before it. Numbers are int32, one of a thread."""
    gl.inline_asm_elementwise(
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
