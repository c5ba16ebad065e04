"""The backend under check, and the device it is checked on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.device import Device
from attnplug.core.dtypes import bare_dtype_name, kv_cache_dtype_name
from attnplug.core.errors import SpecError
from attnplug.core.reasons import Reason
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.testing.batches import Batch, direct_batch, paged_batch
from attnplug.testing.conformance.check import CheckSkipped, Level
from attnplug.testing.conformance.phases import in_phase, of_phase, only_phase

__all__ = ["Target", "canonical"]

_HEAD_SIZES = (64, 128, 16, 32, 80, 96, 112, 192, 256)
_BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 1)


def canonical(allowed: Sequence[int | MultipleOf], samples: Sequence[int]) -> list[int]:
    """What to try of a set of sizes: those listed, and of `samples` those that a MultipleOf holds."""
    listed = [size for size in allowed if isinstance(size, int)]
    return list(dict.fromkeys([*(size for size in samples if MultipleOf.allows(allowed, size)), *listed]))


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One backend on one device of this machine, at one level.

    Args:
        backend: the class.
        device: what the layers are validated for; tensors are made on the torch device of its type.
        level: how much is tried.
    """

    backend: type[AttentionBackend]
    device: Device
    level: Level = Level.SMOKE

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.get_name()

    @property
    def torch_device(self) -> str:
        """Where the tensors are: "cpu", "cuda" (which torch also calls ROCm), "xpu", ..."""
        return "cuda" if self.device.type == "rocm" else self.device.type

    @property
    def dtypes(self) -> list[str]:
        """The dtypes it declares; float32 first, whose errors show most."""
        names = [bare_dtype_name(dtype, "supported_dtypes") for dtype in self.backend.supported_dtypes]
        return sorted(dict.fromkeys(names), key=lambda name: name != "float32")

    @property
    def kv_cache_dtypes(self) -> list[str]:
        """The storage types it declares; "auto" first."""
        names = [
            kv_cache_dtype_name(dtype, "supported_kv_cache_dtypes")
            for dtype in self.backend.supported_kv_cache_dtypes
        ]
        return sorted(dict.fromkeys(names), key=lambda name: name != "auto")

    @property
    def head_sizes(self) -> list[int]:
        """Head sizes to try, the plainest first."""
        return canonical(self.backend.get_supported_head_sizes() or (MultipleOf(1),), _HEAD_SIZES)

    @property
    def block_sizes(self) -> list[int]:
        """Block sizes to try, the preferred one first."""
        allowed = self.backend.get_supported_kernel_block_sizes()
        return list(
            dict.fromkeys([self.backend.get_preferred_block_size(), *canonical(allowed, _BLOCK_SIZES)])
        )

    @property
    def phase(self) -> Phase | None:
        """The one phase that it serves, and is asked about; None for both."""
        return only_phase(self.backend)

    def reasons(self, spec: LayerSpec) -> list[Reason]:
        """Why it does not serve `spec`, in its phase where it has but one; empty where it does."""
        return self.backend.validate_configuration(spec, self.device, self.phase)

    def spec(self, **fields: Any) -> LayerSpec:
        """A small layer that it serves: 4 heads over 2, its plainest head size and dtype, with `fields` set.

        Raises:
            CheckSkipped: no such layer is served; the text has the reasons.
        """
        refusals: list[str] = []
        for base in self._bases(fields):
            try:
                spec = LayerSpec(**{**base, **fields})
            except SpecError as problem:
                refusals.append(str(problem))
                continue
            reasons = self.reasons(spec)
            if not reasons:
                return spec
            refusals += reasons
        raise CheckSkipped(f"{self.name} serves no layer with {fields}: {'; '.join(dict.fromkeys(refusals))}")

    def _bases(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for dtype in self.dtypes:
            for head_size in self.head_sizes:
                for heads, kv_heads in ((4, 2), (4, 4)):
                    yield {
                        "num_heads": heads,
                        "num_kv_heads": kv_heads,
                        "head_size": head_size,
                        "dtype": dtype,
                    }

    def block_size(self, spec: LayerSpec) -> int:
        """The tokens per page it prefers for `spec`."""
        return spec.block_size or self.backend.get_preferred_block_size(spec, self.device)

    def batch(
        self,
        spec: LayerSpec,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        exact: bool = False,
        **options: Any,
    ) -> Batch:
        """A batch for `spec` on this device: pages as the backend has them, or K and V with the call.

        Of a backend of one phase it is made one of that phase, as `of_phase` says.

        Args:
            spec: the layer.
            query_lens: new tokens of each request.
            seq_lens: all tokens of each request.
            exact: whether the check needs these very lengths.
            options: those of `paged_batch` and `direct_batch`.

        Raises:
            CheckSkipped: no such step is of the one phase that the backend serves.
        """
        if self.phase is not None:
            held = [options["key_lens"]] if options.get("key_lens") is not None else []
            new, tokens, *held = of_phase(self.phase, query_lens, seq_lens, *held)
            changed = new != list(query_lens) or tokens != list(seq_lens)
            # An encoder computes all its tokens at once.
            torn = spec.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY) and new != tokens
            if not in_phase(self.phase, new) or (exact and changed) or torn:
                what = f"{self.name} serves {self.phase} only"
                raise CheckSkipped(
                    f"{what}: not asked for queries of {', '.join(map(str, query_lens))} tokens"
                )
            query_lens, seq_lens = new, tokens
            if held:
                options["key_lens"] = held[0]
        if spec.direct_kv:
            for name in ("block_size", "layout", "drop_window"):
                options.pop(name, None)
            return direct_batch(spec, query_lens, seq_lens, device=self.torch_device, **options)
        options.setdefault("block_size", self.block_size(spec))
        options.setdefault("layout", self.backend.supported_kv_cache_layouts()[0])
        return paged_batch(
            spec, query_lens, seq_lens, device=self.torch_device, backend=self.backend, **options
        )
