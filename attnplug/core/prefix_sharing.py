"""Whether requests may read a shared prefix of a layer together, and the layers that compute its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core.kv_format import kv_format
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.core.validation import reads_blocks

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device


def layer_refusal(spec: LayerSpec) -> str | None:
    """Why no backend may read prefixes of such a layer together; None if one may."""
    if spec.state is not None:
        return "a layer that keeps a state reads no keys; states are shared at borders of blocks"
    if spec.attn_type is not AttentionType.DECODER or spec.direct_kv:
        return "only decoder layers with pages have prefixes"
    if not spec.causal:
        return "a layer that sees later tokens has no rest of a request"
    if spec.has_alibi:
        return "ALiBi: pieces of a prefix have no positions"
    if spec.mla is not None:
        return "latent attention: its pieces have no layer of their own yet"
    if spec.sparse is not None:
        return "sparse attention: each row selects keys of its own"
    if spec.mm_prefix:
        return "mm_prefix: spans may cross the end of a prefix"
    if spec.invariance:
        return f"invariance {'+'.join(spec.invariance)}: a merge of parts has other bits than one sum"
    return None


def rest_spec(spec: LayerSpec) -> LayerSpec:
    """The layer of the requests without their shared blocks: the layer itself, with LSE."""
    return spec.replace(needs_lse=True)


def piece_spec(
    backend: type[AttentionBackend], spec: LayerSpec, device: Device, block_size: int | None = None
) -> LayerSpec | None:
    """The layer that attends shared blocks, of which each row sees all keys; None if the backend serves none.

    It is one of cross attention, or one that is not causal, of the same sizes, scale and cap. It has no sinks, because
    the rest counts them.
    """
    plain = {"window": (-1, -1), "chunk_size": None, "has_sinks": False, "needs_lse": True, "causal": False}
    for fields in ({"attn_type": AttentionType.ENCODER_DECODER}, {}):
        made = spec.replace(**plain, **fields)
        if _is_served(backend, made, device, block_size):
            return made
    return None


def sharing_refusal(
    backend: type[AttentionBackend], spec: LayerSpec, device: Device, block_size: int | None = None
) -> str | None:
    """Why a backend cannot read prefixes of a layer together; None if it can.

    Args:
        backend: serves the layer.
        spec: the layer.
        device: of the layer.
        block_size: tokens of its blocks; None if they are not known.
    """
    if (reason := layer_refusal(spec)) is not None:
        return reason
    rest = rest_spec(spec)
    if reasons := backend.validate_configuration(rest, device):
        return f"the rest of a request is refused: {reasons[0]}"
    if not _is_served(backend, rest, device, block_size):
        return f"the rest of a request is refused: it has blocks of {block_size} tokens"
    if piece_spec(backend, spec, device, block_size) is None:
        return "pieces of a prefix are refused: the backend has neither cross attention nor causal=False with LSE"
    return None


def tree_refusal(
    backend: type[AttentionBackend], spec: LayerSpec, device: Device, block_size: int | None = None
) -> str | None:
    """Why a backend cannot verify a draft tree in a layer; None if it can. Arguments as `sharing_refusal`."""
    if (reason := sharing_refusal(backend, spec, device, block_size)) is not None:
        return reason
    if kv_format(spec.resolved_kv_cache_dtype).codec is not None:
        return f"kv_cache_dtype {spec.kv_cache_dtype}: its rows are not copied between blocks"
    return None


def _is_served(
    backend: type[AttentionBackend], spec: LayerSpec, device: Device, block_size: int | None
) -> bool:
    if backend.validate_configuration(spec, device):
        return False
    return block_size is None or reads_blocks(backend, block_size, spec, device)
