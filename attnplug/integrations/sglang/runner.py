"""SGLang's model runner and its arguments: what layers share, and a reason for each that changes the result."""

from __future__ import annotations

from typing import Any

from attnplug.core.errors import SpecError
from attnplug.integrations.sglang.caches import OTHER, check_pool
from attnplug.integrations.sglang.layers import Facts

_ARGUMENTS = {
    "enable_mis": "scores several items in one prompt, which needs a mask that is not served",
    "dllm_algorithm": "runs a diffusion model, which is not served in SGLang",
    "enable_hisparse": "is sparse attention, which is not served in SGLang",
    "enable_prefill_cp": "is context parallelism, which is not served in SGLang",
}
"""The server arguments that change which keys a query sees."""
_SIZES = {
    "dcp_size": "shares the keys of a request between ranks, which is not served in SGLang",
    "attn_cp_size": "shares the queries of a request between ranks, which is not served in SGLang",
    "speculative_eagle_topk": "gives drafts branches, which is not served",
}
"""The server arguments that must be at most 1."""


def check_runner(runner: Any) -> None:
    """SpecError for a runner whose arguments, model or pool are not served."""
    args = runner.server_args
    for name, why in _ARGUMENTS.items():
        value = getattr(args, name, None)
        if value is not None and value is not False:
            raise SpecError(name, value, why, OTHER)
    for name, why in _SIZES.items():
        value = getattr(args, name, None)
        if value is not None and value > 1:
            raise SpecError(name, value, why, "use 1")
    if runner.use_mla_backend:
        raise SpecError("use_mla_backend", True, "is latent attention, which is not served in SGLang", OTHER)
    translator = getattr(runner, "kv_index_translator", None)
    if translator is not None and translator.is_translating:
        raise SpecError(
            "token_to_kv_pool", "unified", "moves its pages, which is not served in SGLang", OTHER
        )
    check_pool(runner.token_to_kv_pool)
    if runner.model_config.is_encoder_decoder and runner.page_size != 1:
        limit = "must be 1: a decoder's tokens start behind an encoder's, inside of a page"
        raise SpecError("page_size", runner.page_size, limit, "pass --page-size 1")


def facts_of(runner: Any) -> Facts:
    """What the layers of a runner share."""
    args = runner.server_args
    deterministic = bool(getattr(args, "enable_deterministic_inference", False))
    return Facts(
        dtype=runner.dtype,
        page_size=int(runner.page_size),
        chunk_size=getattr(runner, "attention_chunk_size", None) or None,
        # Prompts are cut at other places when the prefix cache has a part of them.
        invariance=("batch", "rows") if deterministic else (),
    )


def drafts_of_runner(runner: Any) -> int:
    """The tokens that requests verify beside their own; 0 without drafts."""
    return max(0, int(getattr(runner.server_args, "speculative_num_draft_tokens", None) or 0) - 1)
