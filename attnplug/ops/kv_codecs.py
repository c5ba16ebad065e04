"""The codecs of the formats that attnplug ships: int8 with a scale by token and head, NVFP4, rotated 4 bits."""

from __future__ import annotations

import functools

import torch

from attnplug.ops.storage import quotient

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 16
"""Elements of NVFP4 with one scale."""


class Int8TokenHeadCodec:
    """Integers of -127 to 127, and a float32 scale for each row, which is its largest magnitude / 127."""

    def __init__(self, head_size: int) -> None:
        self.head_size = head_size

    def encode(self, rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        """The integers, and the scales `[..., 1]`. Numbers beyond 2**127 become it."""
        # The largest float32 over 127, times 127, would round to infinity.
        rows = _finite(rows, 2.0**127)
        # A smaller scale would make the quotient infinite.
        own = quotient(rows.abs().amax(-1, keepdim=True), 127).clamp_min(2.0**-120)
        return (rows / own).round_().clamp_(-127, 127).to(torch.int8), own

    def decode(self, planes: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
        """Integers times scales."""
        return planes[0].float() * planes[1]


class NVFP4Codec:
    """E2M1 in four bits, an E4M3 scale for each 16 elements, and the layer's scale. Even elements have the low bits.

    The scale of a block with NaN is the byte 0xFF.
    """

    def __init__(self, head_size: int) -> None:
        self.head_size = head_size

    def encode(self, rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        """Two codes in a byte `[..., head_size / 2]`, and the scales `[..., head_size / 16]`."""
        blocks = _blocks(quotient(_finite(rows), scale), _BLOCK)
        # E4M3 has no scale of less than 2**-9 but zero, and none above 448.
        stored = quotient(blocks.abs().amax(-1), _E2M1[-1]).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
        exact = (blocks / stored.float()[..., None]).flatten(-2)
        levels = _levels(rows.device)[:8]
        middles = (levels[1:] + levels[:-1]) / 2
        # A tie goes to the even code: the middles 0.25, 1.25, 2.5 and 5 belong to the code below, the others to that above.
        below, above = middles[0::2].contiguous(), middles[1::2].contiguous()
        size = exact.abs()
        codes = torch.bucketize(size, below) + torch.bucketize(size, above, right=True)
        codes += 8 * torch.signbit(exact)
        # Moved to float16 by kernels, the negative NaN of E4M3 is one there too.
        stored = torch.where(stored.isnan(), 0xFF, stored.view(torch.uint8)).view(torch.float8_e4m3fn)
        return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), stored

    def decode(self, planes: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
        """The levels times the scales of their blocks and of the layer."""
        data, stored = planes
        codes = torch.stack([data & 15, data >> 4], -1).flatten(-2).long()
        rows: torch.Tensor = (
            _blocks(_levels(data.device)[codes], _BLOCK) * (stored.float() * scale)[..., None]
        )
        return rows.flatten(-2)


class Rotated4Codec:
    """Rows turned by random signs and a Hadamard transform, 16 equal steps, and a float16 scale for each row.

    Turned rows are nearly Gaussian, whatever channels stand out, so that one step width fits all. A byte has the codes
    of elements j and j + head_size / 2. Head sizes that are no power of 2 are turned in blocks.
    """

    _STEP = 0.3352
    """The width of 16 equal steps with the least square error for a Gaussian of variance 1."""

    def __init__(self, head_size: int) -> None:
        self.head_size = head_size
        self.block = head_size & -head_size
        generator = torch.Generator("cpu").manual_seed(head_size)
        # Neither the process's default dtype nor its default device may change the bytes of a page.
        drawn = torch.rand(head_size, generator=generator, dtype=torch.float32, device="cpu")
        self.signs = torch.where(drawn < 0.5, 1.0, -1.0).float()
        self._moved: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def rotate(self, rows: torch.Tensor, back: bool = False) -> torch.Tensor:
        """The rows in the space of the codes, where products with turned queries are the same; or back from there."""
        place = rows.device, rows.dtype
        # Moved once, as a copy from the host would make each call wait.
        signs = self._moved.get(place)
        if signs is None:
            signs = self._moved.setdefault(place, self.signs.to(*place))
        if back:
            return self._transformed(rows) * signs
        return self._transformed(rows * signs)

    def _transformed(self, rows: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = _blocks(rows, self.block) * self.block**-0.5
        step = 1
        shape = turned.shape
        while step < self.block:
            one, other = turned.reshape(*shape[:-1], self.block // (2 * step), 2, step).unbind(-2)
            turned, step = torch.stack([one + other, one - other], -2).reshape(shape), 2 * step
        return turned.flatten(-2)

    def encode(self, rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        """Two codes in a byte `[..., head_size / 2]`, and the scales `[..., 1]`, at most 65,504."""
        turned = self.rotate(_finite(rows, 2.0**59))
        squares = _in_order(turned.square())
        rms = quotient(squares, self.head_size).sqrt().clamp_min_(2.0**-24)
        steps = (turned / (rms * self._STEP) + 7.5).round_().clamp_(0, 15)
        centred = steps - 7.5
        # The decoded row's product with the row is the row's square: a scale of least squares would shrink each logit.
        products = _in_order(turned * centred)
        # A row of zeros has neither; a row with NaN keeps it.
        own = torch.where(products == 0, 0.0, squares / products)
        codes, half = steps.to(torch.uint8), self.head_size // 2
        return codes[..., :half] + 16 * codes[..., half:], own.clamp_(0, 65504).half()

    def decode_rotated(self, planes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The rows before they are turned back, as a kernel reads them."""
        data, own = planes
        codes = torch.cat([data & 15, data >> 4], -1).float()
        return (codes - 7.5) * own.float()

    def decode(self, planes: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
        """The rows."""
        return self.rotate(self.decode_rotated(planes), back=True)


def _in_order(numbers: torch.Tensor) -> torch.Tensor:
    """Sums `[..., 1]` of the last dimension in one order, halves added to halves, so that a kernel can give the same."""
    size = numbers.shape[-1]
    numbers = torch.nn.functional.pad(numbers, (0, (1 << (size - 1).bit_length()) - size))
    while numbers.shape[-1] > 1:
        one, other = numbers.chunk(2, -1)
        numbers = one + other
    return numbers


@functools.cache
def _levels(device: torch.device) -> torch.Tensor:
    """The numbers of E2M1 by their code, on a device: made once, as a copy from the host would make each call wait."""
    return torch.tensor((*_E2M1, *(-level for level in _E2M1)), dtype=torch.float32, device=device)


def _blocks(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Rows `[..., D]` as blocks `[..., D / size, size]`; also without any row, where -1 would have no meaning."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size)


def _finite(rows: torch.Tensor, limit: float = torch.finfo(torch.float32).max) -> torch.Tensor:
    """Rows whose infinities, and numbers beyond the limit, are the largest ones."""
    return rows.clamp(-limit, limit)
