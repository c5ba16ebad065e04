"""One plugin in every engine: the wheel of attnplug-flex serves transformers, its paged batches and the example engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugin_env import RunWithPlugins

ROOT = Path(__file__).parents[2]
FLEX = ROOT / "examples" / "plugins" / "attnplug-flex"
CODE = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests" / "integrations")!r}, {str(ROOT / "examples" / "engine")!r}]
import torch
from engine import Engine
from hf_models import DECODERS
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache

import attnplug
from attnplug.integrations.transformers import attention_decisions

torch.set_grad_enabled(False)
assert attnplug.list_backends()["FLEX"].__module__ == "attnplug_flex.backend"
ours, eager = DECODERS["gemma2"].pair(num_hidden_layers=2)
prompts = [list(range(3, 24)), list(range(40, 46))]
settings = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)

def one_by_one(model):
    return [
        model.generate(torch.tensor([ids]), generation_config=settings)[0, len(ids) :].tolist()
        for ids in prompts
    ]

expected = one_by_one(eager)

assert one_by_one(ours) == expected
used = [decision.backend for decision in attention_decisions(ours).values()]
print("transformers:", *used)

# Without psutil transformers finds no memory on a CPU.
cache.PagedAttentionMemoryHandler.get_available_memory = lambda self: 1 << 30
config = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
results = ours.generate_batch(prompts, generation_config=settings, continuous_batching_config=config)
assert [result.generated_tokens for result in results.values()] == expected, results
decisions = attention_decisions(ours).values()
assert {{decision.spec.direct_kv for decision in decisions}} == {{True, False}}
print("generate_batch:", *[decision.backend for decision in decisions])

engine = Engine(eager, num_blocks=64)
requests = [engine.add(ids, max_tokens=4) for ids in prompts]
assert list(engine.stream())
assert [request.output for request in requests] == expected
print("engine:", *{{str(decision.backend) for decision in engine.runtime.plan.decisions.values()}})
"""


@pytest.mark.slow
def test_one_wheel_serves_each_engine_with_the_tokens_of_eager_attention(
    run_with_plugins: RunWithPlugins,
) -> None:
    done = run_with_plugins([FLEX], CODE)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[-3:] == [
        "transformers: FLEX FLEX",
        "generate_batch: FLEX FLEX",
        "engine: FLEX",
    ]
