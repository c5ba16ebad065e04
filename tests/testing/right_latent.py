"""Correct backends of latent attention that serve little, or take the queries of a decode in another form."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.backends.torch_native.backend import TorchMLABackend
from attnplug.backends.torch_native.latent import TorchMLAImpl
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core import AttentionBackend, Feature
from attnplug.core.mla.backend import QueryLens
from attnplug.core.spec import Phase

__all__ = ["LATENTS"]


class OneByOne(TorchMLAImpl):
    """Each head on its own, in float32; also those that were added to have a multiple of 16."""

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TorchMetadata,
        output: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> None:
        """As MLADecodeImpl.decode."""
        rank = q_nope.shape[2]
        for request in range(metadata.seq_lens.size):
            start, stop = metadata.query_starts[request : request + 2].tolist()
            tokens, size = int(metadata.seq_lens[request]), kv_cache.shape[1]
            blocks = metadata.block_table[request, : -(-tokens // size)]
            latents = kv_cache[blocks].flatten(0, 1)[:tokens].float()
            seen = torch.arange(tokens) <= torch.arange(tokens - stop + start, tokens)[:, None]
            for head in range(q_nope.shape[1]):
                query = torch.cat((q_nope[start:stop, head], q_pe[start:stop, head]), 1).float()
                logits = (query @ latents.T * self.softmax_scale).masked_fill(~seen, -torch.inf)
                lse = logits.logsumexp(1)
                weights = (logits - lse.nan_to_num(neginf=0.0)[:, None]).exp()
                output[start:stop, head] = (weights @ latents[:, :rank]).to(output.dtype)
                if output_lse is not None:
                    output_lse[start:stop, head] = lse


def latent(name: str, **overrides: Any) -> type[AttentionBackend]:
    methods = {
        key: classmethod(value) if callable(value) and not isinstance(value, type) else value
        for key, value in overrides.items()
    }
    return type(name, (TorchMLABackend,), {"get_name": staticmethod(lambda: name), **methods})


_DECODES: dict[str, Any] = {"supported_phases": (Phase.DECODE,), "prefill": None}
LATENT: dict[str, dict[str, Any]] = {
    "LATENT_DECODE": {**_DECODES, "query_lens": QueryLens.SINGLE, "decode_threshold": 1},
    "LATENT_OF_512": {
        **_DECODES,
        "features": Feature.MLA,
        "supported_dtypes": ("bfloat16",),
        "supported_kv_cache_dtypes": ("auto",),
        "latent_sizes": ((512, 64),),
        "get_supported_kernel_block_sizes": lambda cls, spec=None, device=None: (64,),
        "query_lens": QueryLens.SINGLE,
        "decode_threshold": 1,
        "query_layout": "packed",
    },
    "LATENT_UNIFORM": {
        "query_lens": QueryLens.UNIFORM,
        "decode_threshold": 2,
        "features": Feature.MLA | Feature.LSE,
        "supported_kv_cache_dtypes": ("auto",),
    },
    "LATENT_ONE_BY_ONE": {
        "get_impl_cls": lambda cls: OneByOne,
        "padded_heads": lambda cls, num_heads: -(-num_heads // 16) * 16,
        "features": Feature.MLA | Feature.LSE,
        "supported_kv_cache_dtypes": ("auto",),
        "supported_dtypes": ("float16",),
    },
}
_STORED = {"auto": ("auto",), "alias": ("fp8",), "e4m3": ("fp8_e4m3",), "e5m2": ("fp8_e5m2",)}
for _name, _types in _STORED.items():
    served = Feature.MLA | Feature.LSE | (Feature(0) if _name == "auto" else Feature.FP8_KV)
    LATENT[f"LATENT_{_name.upper()}"] = {"features": served, "supported_kv_cache_dtypes": _types}
# The class that `for_layer` gives for sparse layers serves no others.
LATENT["LATENT_SPARSE"] = {
    "features": Feature.MLA | Feature.SPARSE | Feature.LSE,
    "supported_kv_cache_dtypes": ("auto",),
    "serves_dense": False,
}
LATENTS = {name: latent(name, **declared) for name, declared in LATENT.items()}
