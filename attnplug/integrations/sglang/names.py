"""The names by which SGLang's options choose attnplug's backends, and SGLang's lists that they must be in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from attnplug.core.blocks import MultipleOf
from attnplug.registry.default import list_backends

AUTOMATIC = "attnplug"
_PAGE = 64
"""Tokens of a page by default. SGLang's own default is 1, with a table as long as the sequence."""


def register_names() -> None:
    """Add attnplug and a name for each loaded backend to SGLang's choices, unless they are there."""
    names = backends_by_name()
    new = [name for name in names if name not in ATTENTION_BACKENDS]
    for name in new:
        register_attention_backend(name)(functools.partial(_make, names[name]))
    if new:
        choices.add_attention_backend_choices(new)
        choices.add_draft_attention_backend_choices(new)
        choices.add_deterministic_attention_backend_choices(new)
        choices.add_radix_supported_deterministic_attention_backend_choices(new)
    if AUTOMATIC in new:
        for path, hook in _HOOKS.items():
            HookRegistry.register(path, hook, HookType.AROUND)


def backends_by_name() -> dict[str, str | None]:
    """Attnplug's name of the backend for each of SGLang's names; None where attnplug selects."""
    return {AUTOMATIC: None} | {f"{AUTOMATIC}_{name.lower()}": name for name in list_backends()}


def _make(backend: str | None, runner: Any) -> Any:
    # Imported here, because SGLang's processes without a model need the names alone.
    from attnplug.integrations.sglang.backend import Backend

    return Backend(runner, backend)


def page_size_default(original: Callable[[Any], dict[str, Any]], view: Any) -> dict[str, Any]:
    """SGLang's pass for `--page-size`, with pages of 64 tokens for attnplug's backends.

    A backend that reads other pages gets the smallest ones of at least 64 tokens that it reads.
    """
    found = original(view)
    asked = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    chosen = [getattr(view, name, None) for name in asked]
    ours = backends_by_name()
    if found.get("page_size") != 1 or not any(name in ours for name in chosen):
        return found
    sizes = [size_of(backend) for name, backend in ours.items() if name in chosen]
    return {**found, "page_size": max(sizes)}


def with_our_drafts(
    original: Callable[..., Any],
    factory: Any,
    option: str,
    known: dict[str, Any],
    error: str,
    stamps_children: bool = False,
) -> Any:
    """SGLang's choice of a draft model's backend, with attnplug's names beside those of its closed list.

    Args:
        original: SGLang's method.
        factory: its DraftBackendFactory.
        option: of SGLang, whose backend is meant if no other is named for drafts.
        known: by name, functions that make a backend.
        error: of SGLang, for other names.
        stamps_children: whether a backend with one for each step is made: drafts that decode.
    """
    ours = {
        name: functools.partial(_make_for_drafts, factory, name, backend, stamps_children)
        for name, backend in backends_by_name().items()
    }
    return original(factory, option, {**known, **ours}, error, stamps_children)


def _make_for_drafts(factory: Any, name: str, backend: str | None, decodes: bool) -> tuple[str, Any]:
    runner = factory.draft_model_runner
    if not decodes:
        return name, _make(backend, runner)
    from attnplug.integrations.sglang.drafts import DraftBackend

    return name, DraftBackend(runner, backend, factory.topk, factory.speculative_num_steps)


def with_ours_for_gpt_oss(original: Callable[[Any], None], server_args: Any) -> None:
    """SGLang's pass for models, with attnplug's names in its closed list for gpt-oss.

    The list has SGLang's backends with windows and sinks. A backend of attnplug without them refuses the layers itself.
    """
    from sglang.srt.arg_groups import model_hook

    backends_of, ours = model_hook.attention_backends_of, backends_by_name()

    def listed(view: Any) -> tuple[str, ...]:
        found = backends_of(view)
        if "GptOssForCausalLM" not in model_hook.model_config_of(view).hf_config.architectures:
            return tuple(found)
        return tuple("triton" if name in ours else name for name in found)

    # The list is inside of the pass, which reads the names to compare by this function alone.
    model_hook.attention_backends_of = listed
    try:
        original(server_args)
    finally:
        model_hook.attention_backends_of = backends_of


_HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.arg_groups.overrides._page_size_default": page_size_default,
    "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments": with_ours_for_gpt_oss,
    "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend": with_our_drafts,
}
"""The functions of SGLang that are called through one of ours."""


def size_of(backend: str | None) -> int:
    """The smallest page of at least 64 tokens that a backend reads."""
    if backend is None:
        return _PAGE
    offered = list_backends()[backend].get_supported_kernel_block_sizes()
    found = [-(-_PAGE // each.base) * each.base if isinstance(each, MultipleOf) else each for each in offered]
    return min((each for each in found if each >= _PAGE), default=_PAGE)
