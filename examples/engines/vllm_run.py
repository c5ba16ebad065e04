"""One choice of vLLM's attention, in a process of its own: a model whose tokens attention finds, and its speed.

`vllm_demo.py` starts it as `python vllm_run.py NAME[=BACKEND][:OPTIONS]`, with the settings as JSON on standard input.
It prints one line of JSON after `MARK`, and on standard error how far it is.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm_lookup
import vllm_model

BEGIN = time.perf_counter()
MARK = "vllm_demo result: "
DECODE_ROUNDS = 4
"""Runs of decodes for each of prefill."""


def main() -> None:
    """Run the choice and print its result."""
    name, settings = prepare(sys.argv[1]), json.load(sys.stdin)
    say("starts vLLM")
    llm = build(name, settings)
    result = {
        "start_s": time.perf_counter() - BEGIN,
        "workloads": measure(llm, settings["workloads"], settings["max_tokens"], settings["rounds"]),
        "layers": layers(llm) if name.startswith("ATTNPLUG") else [],
    }
    print(MARK + json.dumps(result), flush=True)


def prepare(choice: str) -> str:
    """The name of a choice in vLLM; its settings are in the environment of this process from here on."""
    asked, _, options = choice.partition(":")
    name, _, backend = asked.partition("=")
    for variable, value in (("ATTNPLUG_OPTIONS", options), ("ATTNPLUG_BACKEND", backend)):
        if value:
            os.environ[variable] = value
    # One process, so that the layers can be asked for their decisions; nothing is downloaded.
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it compiles kernels at its first use
    os.environ.update({**quiet, "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")})
    return name


def say(what: str) -> None:
    """Print what comes now and the seconds so far, for a run that takes too long."""
    print(f"vllm_run: {time.perf_counter() - BEGIN:.0f} s: {what}", file=sys.stderr, flush=True)


def build(name: str, settings: Mapping[str, Any]) -> Any:
    """The engine of vLLM for the configuration, with weights whose tokens are known."""
    import vllm

    vllm_model.register_weights(vllm_lookup.LOAD_FORMAT, vllm_lookup.fill)
    if name.startswith("ATTNPLUG"):
        # vLLM does this itself where attnplug is installed, and not only on the path.
        from attnplug.integrations.vllm import register

        register()
    if settings["dense"]:
        vllm_model.dense_experts(json.loads(Path(settings["model"]).read_text()))
    longest = max(max(lengths) for lengths in settings["workloads"].values())
    requests = max(len(lengths) for lengths in settings["workloads"].values())
    graphs = {} if settings["eager"] else {"cudagraph_capture_sizes": [requests]}
    return vllm.LLM(
        model=vllm_model.folder(settings["model"], settings["layers"]),
        load_format=vllm_lookup.LOAD_FORMAT,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend=name,
        max_model_len=longest + settings["max_tokens"],
        max_num_seqs=requests,
        gpu_memory_utilization=settings["memory"],
        enforce_eager=settings["eager"],
        compilation_config=graphs,
        enable_flashinfer_autotune=False,  # it is for quantized weights, and can compile kernels at the start
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
    )


def measure(
    llm: Any, workloads: Mapping[str, Sequence[int]], max_tokens: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Tokens per second of prefill and decode, the best of the rounds, and the requests with the right tokens, by workload.

    A run of one token is the prefill, from an empty cache. The prompts are in the cache when decoding is measured, so
    all requests decode together from their first step. Each round has all workloads, and several decodes: they are
    short, and wait for the host while it is slow.
    """
    draw = random.Random(0)  # noqa: S311
    plan = vllm_lookup.Plan.of(llm.llm_engine.vllm_config.model_config.hf_text_config)
    prompts = {
        name: [{"prompt_token_ids": plan.prompt(length, draw)} for length in lengths]
        for name, lengths in workloads.items()
    }
    filling: dict[str, list[float]] = {name: [] for name in workloads}
    runs: dict[str, list[Any]] = {name: [] for name in workloads}
    for number in range(rounds):
        for name, given in prompts.items():
            say(f"{name}, round {number + 1}")
            if not llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not empty its prefix cache, so prefills cannot be measured")
            begin = time.perf_counter()
            generate(llm, given, 1)
            filling[name].append(time.perf_counter() - begin)
            runs[name] += [generate(llm, given, max_tokens) for _ in range(DECODE_ROUNDS)]
    found = {}
    for name, lengths in workloads.items():
        times = [step_seconds(outputs, max_tokens) for outputs in runs[name]]
        expected = [plan.follow(prompt["prompt_token_ids"], max_tokens) for prompt in prompts[name]]
        right = [
            all(list(outputs[index].outputs[0].token_ids) == tokens for outputs in runs[name])
            for index, tokens in enumerate(expected)
        ]
        found[name] = {
            "prefill_tokens_per_s": sum(lengths) / min(filling[name]),
            "slowest_prefill_tokens_per_s": sum(lengths) / max(filling[name]),
            "decode_tokens_per_s": len(lengths) / min(times),
            "decode_ms_per_step": 1e3 * min(times),
            "slowest_decode_ms_per_step": 1e3 * max(times),
            "right": sum(right) / len(right),
        }
    return found


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
    """What attnplug chose: layers with one decision together, with the reasons against the other backends."""
    from attnplug.integrations.vllm import decisions

    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, decision in decisions(llm.llm_engine.vllm_config).items():
        against = tuple((each.name, "; ".join(each.reasons)) for each in decision.refused)
        behind = tuple((each.name, each.priority) for each in decision.candidates if each.accepted)
        kinds = " ".join(decision.spec.kinds)
        key = (decision.backend, kinds, why(decision), decision.block_size, behind, against)
        groups.setdefault(key, []).append(name)
    fields = ("backend", "kinds", "why", "block_size", "accepted", "refused")
    return [{**dict(zip(fields, key, strict=True)), "layers": names} for key, names in groups.items()]


def why(decision: Any) -> tuple[str, ...]:
    """The rule that asked for the backend, or for each phase what put its backend first."""
    import attnplug

    if decision.rule is not None and decision.chosen_by != "plan":
        return (f"asked for by {decision.chosen_by}, {decision.rule}",)
    reasons = []
    for phase, name in decision.members.items():
        alone = attnplug.explain(decision.spec, decision.device, phase)
        first = str(alone.measured) if alone.measured else f"first by {alone.chosen_by}"
        reasons.append(f"{phase} on {name}: {first if alone.backend == name else 'serves both phases'}")
    return (*reasons, *decision.notes)


if __name__ == "__main__":
    main()
