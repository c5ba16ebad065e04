"""One choice of vLLM's attention: a model whose tokens attention finds, and its speed.

`vllm_demo.py` starts it as `python vllm_run.py NAME[=BACKEND][:OPTIONS]`, with the settings as JSON on standard input.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import choice_run
import lookup
import model_folder
import rank_processes
import vllm_model

AT_ONCE = 16 << 30
"""Bytes for keys and values where other choices are on the GPU."""


def main() -> None:
    """Run the choice and print its result."""
    name, settings = prepare(sys.argv[1]), json.load(sys.stdin)
    with rank_processes.started(settings):
        choice_run.say("starts vLLM")
        llm = build(name, settings)
        result = choice_run.report(Served(llm), settings)
        choice_run.tell({**result, "layers": layers(llm) if name.startswith("ATTNPLUG") else []})
    if settings.get("ranks", 1) > 1:
        # The groups of processes could wait for a rank that has ended.
        os._exit(0)


def prepare(choice: str) -> str:
    """The name of a choice in vLLM; its settings are in the environment of this process from here on."""
    # One process, so that the layers can be asked for their decisions; nothing is downloaded.
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it compiles kernels at its first use
    os.environ.update({**quiet, "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")})
    return choice_run.split(choice)


def build(name: str, settings: Mapping[str, Any]) -> Any:
    """The engine of vLLM for the configuration, with weights whose tokens are known."""
    import vllm

    ranks = settings.get("ranks", 1)
    fill = functools.partial(lookup.fill, rank=rank_processes.rank(), ranks=ranks)
    vllm_model.register_weights(lookup.LOAD_FORMAT, fill)
    if name.startswith("ATTNPLUG"):
        # vLLM does this itself where attnplug is installed, and not only on the path.
        from attnplug.integrations.vllm import register

        register()
    config = json.loads(Path(settings["model"]).read_text())
    if settings["dense"] and "first_k_dense_replace" not in config:
        vllm_model.dense_experts(model_folder.dense_size(config))
    longest = max(max(lengths) for lengths in settings["workloads"].values())
    requests = max(len(lengths) for lengths in settings["workloads"].values())
    compilation: dict[str, Any] = {} if settings["eager"] else {"cudagraph_capture_sizes": [requests]}
    shared: dict[str, Any] = {}
    if settings.get("at_once"):
        # vLLM would count what the others take meanwhile.
        shared["kv_cache_memory_bytes"] = AT_ONCE
    if ranks > 1:
        # FlashInfer's kernels for this use NVLink's multicast.
        compilation["pass_config"] = {"fuse_allreduce_rms": False}
        shared |= {
            "tensor_parallel_size": ranks,
            "decode_context_parallel_size": ranks,
            "distributed_executor_backend": "external_launcher",
            "disable_custom_all_reduce": True,
        }
    return vllm.LLM(
        model=model_folder.folder(
            settings["model"], settings["layers"], one_kv_head=ranks > 1, dense=settings["dense"]
        ),
        load_format=lookup.LOAD_FORMAT,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend=name,
        max_model_len=longest + settings["max_tokens"],
        max_num_seqs=requests,
        gpu_memory_utilization=settings["memory"],
        enforce_eager=settings["eager"],
        compilation_config=compilation,
        enable_flashinfer_autotune=False,  # it is for quantized weights, and can compile kernels at the start
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
        **shared,
    )


class Served:
    """vLLM's engine, as `choice_run.measure` runs it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.plan = lookup.Plan.of(llm.llm_engine.vllm_config.model_config.hf_text_config)

    def empty_cache(self) -> None:
        """Forget the prompts of earlier runs."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache, so prefills cannot be measured")

    def prefill(self, prompts: Sequence[list[int]]) -> None:
        """Draw one token for each prompt."""
        generate(self.llm, _given(prompts), 1)

    def decode(self, prompts: Sequence[list[int]], count: int) -> tuple[list[list[int]], float]:
        """Tokens of each prompt, and the mean seconds of a step."""
        outputs = generate(self.llm, _given(prompts), count)
        return [list(output.outputs[0].token_ids) for output in outputs], step_seconds(outputs, count)


def _given(prompts: Sequence[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def generate(llm: Any, prompts: Sequence[Any], count: int) -> list[Any]:
    """The requests' outputs of `count` tokens each, the most likely ones."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs: list[Any] = llm.generate(prompts, sampling, use_tqdm=False)
    return outputs


def step_seconds(outputs: Sequence[Any], count: int) -> float:
    """The mean time of a decode: the request that began last has `count - 1` of them, all with every request."""
    begin = max(output.metrics.first_token_ts for output in outputs)
    end = max(output.metrics.last_token_ts for output in outputs)
    return max(end - begin, 1e-9) / (count - 1)


def layers(llm: Any) -> list[dict[str, Any]]:
    """What attnplug chose, as `choice_run.groups`."""
    from attnplug.integrations.vllm import decisions

    return choice_run.groups(decisions(llm.llm_engine.vllm_config).items())


if __name__ == "__main__":
    main()
