"""Serves small models with the frozen engine, on frozen plugins and on TORCH, and compares the tokens with `generate`."""

from __future__ import annotations

import copy
import random

import attnplug_acme
import attnplug_flex
import torch
from engine import Engine
from tiny import load

import attnplug

torch.set_num_threads(1)
attnplug.register(attnplug_acme, "acme")
attnplug.register(attnplug_flex, "flex")
draw = random.Random(0)
for name, config in (("ACME", "llama-3.1-8b"), ("FLEX", "gpt-oss-20b"), ("TORCH", "gpt-oss-20b")):
    model = load(f"examples/models/{config}.json", "tiny")
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    with attnplug.use(name):
        engine = Engine(model, num_blocks=128, max_num_batched_tokens=24, max_num_seqs=2)
    prompts = [[draw.randrange(model.config.vocab_size) for _ in range(length)] for length in (40, 3, 17)]
    requests = [engine.add(prompt, max_tokens=5) for prompt in prompts]
    for _ in engine.stream():
        pass
    for prompt, request in zip(prompts, requests, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        drawn = reference.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        assert request.output == drawn[0, len(prompt) :].tolist(), (name, prompt)
    backends = {decision.backend for decision in engine.runtime.plan.decisions.values()}
    print(*backends)
