"""The options of FLASHINFER, and a limit that its declaration and its calls check; torch-free."""

from __future__ import annotations

import dataclasses
from typing import Literal

from attnplug.core.errors import PolicyError
from attnplug.core.spec import LayerSpec

# FlashInfer before 0.7.2 masks with a logit of -50000 and then scales it: at this scale it still weighs nothing.
LEAST_SCALE = 2.0**-11
_PREFILL = ("auto", "fa2", "fa3")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Options of FLASHINFER.

    Args:
        prefill_backend: the template of everything that is not a decode: "fa2", "fa3" (GPUs of compute
            capability 9 and no fp8 KV), or "auto": fa3 where it can be.
        tensor_cores: whether decodes run on tensor cores, which are faster for grouped queries.
        workspace_bytes: size of the scratch buffer that all layers of a device share; None for the size
            that the layers need, at least 128 MiB.

    Raises:
        PolicyError: another value.
    """

    prefill_backend: Literal["auto", "fa2", "fa3"] = "auto"
    tensor_cores: bool = True
    workspace_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.prefill_backend not in _PREFILL:
            limit = f"must be one of {', '.join(_PREFILL)}"
            raise PolicyError("options['prefill_backend']", self.prefill_backend, limit)
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise PolicyError(
                "options['workspace_bytes']", self.workspace_bytes, "must be at least 1, or None"
            )


def too_small_scale(spec: LayerSpec) -> str | None:
    """Why the layer's scale cannot be served; None if it can."""
    # A soft cap scales logits before they are masked.
    if spec.scale >= LEAST_SCALE or spec.logits_soft_cap is not None:
        return None
    return (
        f"scale={spec.scale:g} is below {LEAST_SCALE:g}: "
        "FlashInfer masks with a finite logit before it scales, so masked keys would get weight"
    )
