"""SGLang's side of a model for sglang_run.py, in the process of SGLang's scheduler: weights, progress, decisions."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import choice_run
import lookup
import torch

_EXECUTOR = "sglang.srt.model_executor."
_STEPS = {
    "model_runner.ModelRunner.load_model": "made the model",
    "model_runner.ModelRunner.alloc_memory_pool": "allocated the pages",
    "model_runner.ModelRunner.init_attention_backends": "made the attention backend",
    "runner.eager_runner.EagerRunner.warmup": "run its own warm-up",
    "model_runner_components.cuda_graph_setup.capture_prefill_graph": "ended graphs of prompts, if any",
    "model_runner_components.cuda_graph_setup.capture_decode_graph": "ended graphs of decodes, if any",
}
"""SGLang's functions that may take long, and what each has done."""


def run_scheduler(begin: float, dense_size: int | None, *given: Any, **named: Any) -> None:
    """SGLang's scheduler process, with the weights of `lookup.fill` in place of its dummy weights.

    Args:
        begin: the time from which progress is counted.
        dense_size: the inner size of a dense block in place of gpt-oss's experts, or None.
        *given: as SGLang's own function takes them.
        **named: the same.
    """
    choice_run.say("a scheduler has imported SGLang", begin)
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # SGLang has no option for a loader of one's own; this one is called before weights are packed for a processor.
    HookRegistry.register("sglang.srt.model_loader.loader.initialize_dummy_weights", _fill)
    for path, done in _STEPS.items():
        HookRegistry.register(_EXECUTOR + path, functools.partial(_report, done, begin), HookType.AFTER)
    if dense_size is not None:
        _dense_experts(dense_size)
    _say_what_attnplug_logs(begin)
    Scheduler.write_attnplug_layers = _write_layers
    run_scheduler_process(*given, **named)


def _fill(result: None, model: Any, *_: Any, **__: Any) -> None:
    lookup.fill(model, model.config)

    def with_head(_: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs, hidden, head, *rest = given
        return inputs, hidden, model.lm_head if head is model.model.embed_tokens else head, *rest

    # SGLang's Gemma 3 takes the embeddings in place of its head, also where the configuration has both.
    model.logits_processor.register_forward_pre_hook(with_head)


def _report(done: str, begin: float, *_: Any, **__: Any) -> None:
    choice_run.say(f"SGLang has {done}", begin)


class _Say(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line such as attnplug's on the kernels that it has compiled."""
        self._say(record.getMessage().partition("\n")[0])


def _say_what_attnplug_logs(begin: float) -> None:
    log = logging.getLogger("attnplug")
    log.setLevel(logging.INFO)
    log.addHandler(_Say(functools.partial(choice_run.say, begin=begin)))


def _dense_experts(size: int) -> None:
    """Replace gpt-oss's experts by a dense block of an inner size."""
    from sglang.srt.models import gpt_oss
    from sglang.srt.models.llama import LlamaMLP

    class Dense(LlamaMLP):  # type: ignore[misc]  # SGLang is not there for type checkers
        """The block of a gpt-oss layer in place of its experts."""

        def __init__(self, layer_id: int, config: Any, prefix: str = "", **_: Any) -> None:
            # The layer adds up what ranks have.
            super().__init__(config.hidden_size, size, "silu", prefix=prefix, reduce_results=False)

    gpt_oss.GptOssSparseMoeBlock = Dense


def _write_layers(scheduler: Any, path: str) -> None:
    """Write what attnplug chose to a file of JSON, as `choice_run.groups`; called by `Engine.collective_rpc`."""
    from attnplug.integrations.sglang import decisions

    found = decisions(scheduler.tp_worker.model_runner.attn_backend)
    Path(path).write_text(json.dumps(choice_run.groups(found.items())))
