"""One choice of SGLang's attention: a model whose tokens attention finds, and its speed.

`sglang_demo.py` starts it as `python sglang_run.py NAME[=BACKEND][:OPTIONS]`, with the settings as JSON on standard input.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import choice_run
import lookup
import model_folder
import sglang_model


def main() -> None:
    """Run the choice and print its result."""
    name, settings = choice_run.split(sys.argv[1]), json.load(sys.stdin)
    os.environ["HF_HUB_OFFLINE"] = "1"
    choice_run.say("starts SGLang")
    engine = build(name, settings)
    choice_run.say("SGLang is ready")
    result = choice_run.report(Served(engine), settings)
    choice_run.tell({**result, "layers": layers(engine) if name.startswith("attnplug") else []})
    engine.shutdown()


def build(name: str, settings: Mapping[str, Any]) -> Any:
    """The engine of SGLang for the configuration, with weights whose tokens are known."""
    from sglang.srt.entrypoints import engine

    dense = None
    if settings["dense"]:
        dense = model_folder.dense_size(json.loads(Path(settings["model"]).read_text()))
    scheduler = functools.partial(sglang_model.run_scheduler, choice_run.BEGIN, dense)

    class Engine(engine.Engine):  # type: ignore[misc]  # SGLang is not there for type checkers
        """SGLang's engine, whose scheduler process begins with ours."""

        run_scheduler_process_func = staticmethod(scheduler)

    return Engine(
        model_path=model_folder.folder(settings["model"], settings["layers"]),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        device=settings["device"],
        attention_backend=name,
        sampling_backend="pytorch",
        grammar_backend="none",
        page_size=settings["page_size"],
        mem_fraction_static=settings["memory"],
        # The first token is sent at once, and the others together, so that sending takes little of a step.
        stream_interval=settings["max_tokens"],
        log_level="warning",
        random_seed=0,
        **_sizes(settings),
    )


def _sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's options by the sizes of the workloads."""
    given, page, more = settings["workloads"].values(), settings["page_size"], settings["max_tokens"]
    longest, requests = max(map(max, given)), max(map(len, given))
    # SGLang ends a request a few tokens before the limit.
    found = {"context_length": longest + more + 64, "max_running_requests": requests}
    if settings["eager"]:
        found["disable_cuda_graph"] = True
    else:
        found["cuda_graph_bs_decode"] = [requests]
    if settings["device"] == "cpu" or settings["at_once"]:
        # SGLang would take a share of the whole memory. Layers with windows get fewer pages than others.
        pages = max(sum(-(-(length + more) // page) + 1 for length in each) for each in given)
        found["max_total_tokens"] = (pages + (pages if settings["device"] == "cpu" else pages // 3)) * page
    return found


class Served:
    """SGLang's engine, as `choice_run.measure` runs it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.plan = lookup.Plan.of(engine.tokenizer_manager.model_config.hf_text_config)

    def empty_cache(self) -> None:
        """Forget the prompts of earlier runs."""
        # A request may still be on its way out when its last token has come.
        for _ in range(50):
            if self.engine.flush_cache().success:
                return
            time.sleep(0.1)
        raise RuntimeError("SGLang did not empty its prefix cache, so prefills cannot be measured")

    def prefill(self, prompts: Sequence[list[int]]) -> None:
        """Draw one token for each prompt."""
        self.engine.generate(input_ids=prompts, sampling_params=_sampling(1))

    def decode(self, prompts: Sequence[list[int]], count: int) -> tuple[list[list[int]], float]:
        """Tokens of each prompt, and the mean seconds of a step.

        The request that begins last has `count - 1` decodes, all with every request.
        """
        begin, drawn = [0.0] * len(prompts), [list[int]() for _ in prompts]
        last = 0.0
        for part in self.engine.generate(input_ids=prompts, sampling_params=_sampling(count), stream=True):
            index, last = part["index"], time.perf_counter()
            begin[index] = begin[index] or last
            drawn[index] = list(part["output_ids"])
            if part["meta_info"]["num_retractions"]:
                raise RuntimeError(
                    "SGLang stopped a request for want of pages, so steps differ; give more --memory"
                )
        return drawn, max(last - max(begin), 1e-9) / (count - 1)


def _sampling(count: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}


def layers(engine: Any) -> list[dict[str, Any]]:
    """What attnplug chose, as `choice_run.groups`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "layers.json"
        engine.collective_rpc("write_attnplug_layers", path=str(file))
        found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


if __name__ == "__main__":
    main()
