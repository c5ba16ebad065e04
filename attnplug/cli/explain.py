"""`attnplug explain`: one layer given by flags, and what every backend says of it."""

from __future__ import annotations

from typing import Annotated

import typer

from attnplug.cli.arguments import (
    AllowRefuted,
    AsJson,
    AssumedVersions,
    BackendRules,
    BlockSize,
    DeviceText,
    KVCacheDtype,
    PhaseChoice,
    allowed,
    assumed,
)
from attnplug.cli.output import console, print_json
from attnplug.core.errors import SpecError
from attnplug.core.spec import AttentionType, LayerSpec, MLADims

__all__ = ["explain"]

_LAYER = "The layer"


def explain(
    num_heads: Annotated[int, typer.Option(help="Query heads.", rich_help_panel=_LAYER)] = 32,
    num_kv_heads: Annotated[
        int | None, typer.Option(help="Key and value heads [default: as num-heads].", rich_help_panel=_LAYER)
    ] = None,
    head_size: Annotated[int, typer.Option(help="Elements per head.", rich_help_panel=_LAYER)] = 128,
    head_size_v: Annotated[
        int | None, typer.Option(help="Elements per value head, if different.", rich_help_panel=_LAYER)
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float16, bfloat16 or float32.", rich_help_panel=_LAYER)
    ] = "bfloat16",
    kv_cache_dtype: KVCacheDtype = "auto",
    block_size: BlockSize = None,
    attn_type: Annotated[
        AttentionType, typer.Option(help="Who attends whom.", rich_help_panel=_LAYER)
    ] = AttentionType.DECODER,
    causal: Annotated[
        bool | None, typer.Option(help="[default: causal for a decoder]", rich_help_panel=_LAYER)
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Softmax scale.", rich_help_panel=_LAYER)] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="LEFT,RIGHT", help="Keys seen on each side; -1 is no limit.", rich_help_panel=_LAYER
        ),
    ] = None,
    sliding_window: Annotated[
        int | None, typer.Option(help="Keys seen, the query's own included.", rich_help_panel=_LAYER)
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(help="Chunked local attention.", rich_help_panel=_LAYER)
    ] = None,
    soft_cap: Annotated[
        float | None, typer.Option(help="Soft cap on the logits.", rich_help_panel=_LAYER)
    ] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="Attention sinks.", rich_help_panel=_LAYER)] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi slopes.", rich_help_panel=_LAYER)] = False,
    mla: Annotated[
        str | None,
        typer.Option(
            metavar="Q,KV,NOPE,ROPE,V", help="MLA dimensions; Q may be 0 for none.", rich_help_panel=_LAYER
        ),
    ] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Sparse attention.", rich_help_panel=_LAYER)
    ] = False,
    mm_prefix: Annotated[
        bool, typer.Option("--mm-prefix", help="Bidirectional multimodal spans.", rich_help_panel=_LAYER)
    ] = False,
    direct_kv: Annotated[
        bool, typer.Option("--direct-kv", help="K and V come with the call.", rich_help_panel=_LAYER)
    ] = False,
    lse: Annotated[
        bool, typer.Option("--lse", help="The log-sum-exp is needed.", rich_help_panel=_LAYER)
    ] = False,
    device: DeviceText = "current",
    phase: PhaseChoice = None,
    backend: BackendRules = None,
    assume_installed: AssumedVersions = None,
    allow_refuted: AllowRefuted = None,
    as_json: AsJson = False,
) -> None:
    """Explain who serves one layer, given by flags, and why each other does not. Imports no backend's parts."""
    from attnplug.registry.default import explain as ask

    dims = None if mla is None else _mla(mla)
    spec = LayerSpec(
        num_heads=num_heads,
        num_kv_heads=(num_heads if dims is None else 1) if num_kv_heads is None else num_kv_heads,
        head_size=head_size if dims is None else dims.kv_lora_rank + dims.qk_rope_head_dim,
        head_size_v=head_size_v,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        attn_type=attn_type,
        causal=causal,
        scale=scale,
        window=(-1, -1) if window is None else _integers("--window", window, 2),
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        logits_soft_cap=soft_cap,
        has_sinks=sinks,
        has_alibi=alibi,
        mla=dims,
        sparse=sparse,
        mm_prefix=mm_prefix,
        direct_kv=direct_kv,
        needs_lse=lse,
    )
    decision = ask(
        spec,
        device,
        phase,
        backend=backend,
        assume_installed=assumed(assume_installed),
        allow_refuted=allowed(allow_refuted),
    )
    if as_json:
        print_json(decision.to_dict())
    else:
        console().print(decision)
    raise typer.Exit(0 if decision else 3)


def _integers(option: str, text: str, count: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise SpecError(option, text, f"must be {count} integers with commas between them")
    return numbers


def _mla(text: str) -> MLADims:
    q, kv, nope, rope, v = _integers("--mla", text, 5)
    return MLADims(
        q_lora_rank=q or None, kv_lora_rank=kv, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v
    )
