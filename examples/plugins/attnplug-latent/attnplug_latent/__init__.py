"""LATENT: latent attention (MLA) whose author wrote only the decode; the declaration, which imports no torch."""

from __future__ import annotations

from attnplug import hookimpl
from attnplug.core import Feature, MLADecodeBackend, QueryLens

ATTNPLUG_API = (1, 1)


class LatentBackend(MLADecodeBackend):
    """Decodes requests with up to 4 queries each; `attnplug.plan` chooses the backend of the prefills."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    supported_kv_cache_dtypes = ("auto", "fp8_e4m3")
    features = Feature.MLA | Feature.SPARSE | Feature.LSE | Feature.FP8_KV
    latent_sizes = ((512, 64), (256, 64))
    query_layout = "packed"
    query_lens = QueryLens.UNIFORM
    decode_threshold = 4

    @staticmethod
    def get_name() -> str:
        """The name that users type."""
        return "LATENT"

    @classmethod
    def padded_heads(cls, num_heads: int) -> int:
        """The next multiple of 16, as kernels on tensor cores need it."""
        return -(-num_heads // 16) * 16

    @classmethod
    def get_impl_cls(cls):
        """The class with `decode`."""
        from attnplug_latent.decode import LatentImpl

        return LatentImpl

    @classmethod
    def get_builder_cls(cls):
        """The base's builder, which gives `decode` the step of the decodes."""
        from attnplug.mla import MLADecodeBuilder

        return MLADecodeBuilder


@hookimpl
def attnplug_backends():
    """The backends of this plugin."""
    return (LatentBackend,)
