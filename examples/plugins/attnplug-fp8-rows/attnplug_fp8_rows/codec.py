"""The codec: imported when pages are written or read, because it needs torch."""

import torch


class Fp8TokenHeadCodec:
    """Rows over their own scale, which is their largest magnitude / 448."""

    def __init__(self, head_size: int) -> None:
        self.head_size = head_size

    def encode(self, rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        """The 8-bit floats, and the scales `[..., 1]`. The layer's scale is not used."""
        # Infinity over infinity would be NaN.
        rows = rows.clamp(-(2.0**127), 2.0**127)
        own = (rows.abs().amax(-1, keepdim=True) / 448).clamp_min(2.0**-120)
        return (rows / own).clamp(-448, 448).to(torch.float8_e4m3fn), own

    def decode(self, planes: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
        """The floats times their scales."""
        data, own = planes
        return data.float() * own
