"""One choice of vLLM's attention, in a process of its own: a model with made-up weights, its speed and its tokens.

`vllm_demo.py` starts it as `python vllm_run.py CHOICE`, with the settings as JSON on standard input. It prints one
line of JSON after `MARK`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "vllm_demo result: "


def main() -> None:
    """Run the choice and print its result."""
    choice, settings = sys.argv[1], json.load(sys.stdin)
    # One process, so that the layers can be asked for their decisions; nothing is downloaded.
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it compiles kernels at its first use
    os.environ.update({**quiet, "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")})
    llm = build(choice, settings)
    result = {
        "workloads": measure(llm, settings["workloads"], settings["max_tokens"], settings["rounds"]),
        "layers": layers(llm) if choice.startswith("ATTNPLUG") else [],
    }
    print(MARK + json.dumps(result), flush=True)


def build(choice: str, settings: Mapping[str, Any]) -> Any:
    """The engine of vLLM for the configuration, with random weights."""
    import vllm

    folder = Path(tempfile.mkdtemp())
    config = json.loads(Path(settings["model"]).read_text())
    if settings["layers"]:
        config["num_hidden_layers"] = settings["layers"]
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][: settings["layers"]]
    (folder / "config.json").write_text(json.dumps(config))
    longest = max(max(lengths) for lengths in settings["workloads"].values())
    return vllm.LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend=choice,
        max_model_len=longest + settings["max_tokens"],
        max_num_seqs=max(len(lengths) for lengths in settings["workloads"].values()),
        gpu_memory_utilization=settings["memory"],
        enforce_eager=settings["eager"],
        enable_prefix_caching=False,
        seed=0,
    )


def measure(
    llm: Any, workloads: Mapping[str, Sequence[int]], max_tokens: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Tokens per second of prefill and decode, the best of the rounds, and each request's tokens, by workload.

    A run of one token is the prefill. Decoding is the time that a run of `max_tokens` takes more.
    """
    from vllm import SamplingParams

    found = {}
    draw = random.Random(0)  # noqa: S311
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    for name, lengths in workloads.items():
        prompts = [
            {"prompt_token_ids": [draw.randrange(3, vocabulary) for _ in range(length)]} for length in lengths
        ]
        times: dict[int, list[float]] = {1: [], max_tokens: []}
        outputs: list[Any] = []
        # The first round also compiles kernels.
        for _ in range(rounds + 1):
            for count, seconds in times.items():
                sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
                begin = time.perf_counter()
                outputs = llm.generate(prompts, sampling, use_tqdm=False)
                seconds.append(time.perf_counter() - begin)
        first, whole = min(times[1][1:]), min(times[max_tokens][1:])
        decoding = max(whole - first, 1e-9)
        found[name] = {
            "prefill_tokens_per_s": sum(lengths) / first,
            "decode_tokens_per_s": len(lengths) * (max_tokens - 1) / decoding,
            "decode_ms_per_step": 1e3 * decoding / (max_tokens - 1),
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        }
    return found


def layers(llm: Any) -> list[dict[str, Any]]:
    """What attnplug chose: layers with one decision together, with the reasons against the other backends."""
    from attnplug.integrations.vllm import decisions

    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, decision in decisions(llm.llm_engine.vllm_config).items():
        against = tuple((each.name, "; ".join(each.reasons)) for each in decision.refused)
        behind = tuple((each.name, each.priority) for each in decision.candidates if each.accepted)
        kinds = " ".join(decision.spec.kinds)
        key = (decision.backend, kinds, decision.chosen_by, decision.block_size, behind, against)
        groups.setdefault(key, []).append(name)
    fields = ("backend", "kinds", "chosen_by", "block_size", "accepted", "refused")
    return [{**dict(zip(fields, key, strict=True)), "layers": names} for key, names in groups.items()]


if __name__ == "__main__":
    main()
