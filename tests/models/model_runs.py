"""A model run over given texts on one backend: as a transformers model, and by the example engine."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import torch
from engine import Engine
from logit_bounds import Found, Reference
from model_families import FAMILIES, Sizes
from transformers import DynamicCache

import attnplug
from attnplug.errors import BackendUnavailableError
from attnplug.integrations.transformers import attention_decisions, set_attention
from attnplug.runtime import StepBatch

__all__ = ["RUNS", "EngineRun", "make_texts", "references", "refusal", "rules", "whole_text"]

Texts = list[list[int]]


def make_texts(sizes: Sizes) -> Texts:
    """Random texts, prompts and what follows them; the last begins as the first does."""
    draw = random.Random(0)
    texts = [[draw.randrange(3, 256) for _ in range(count + sizes.decodes)] for count in sizes.prompts]
    texts[-1][: sizes.shared] = texts[0][: sizes.shared]
    return texts


def whole_text(model: Any, text: list[int]) -> torch.Tensor:
    """Logits `[L, V]` in float32 of one text in one pass."""
    with torch.inference_mode():
        return model(torch.tensor([text], device=model.device), use_cache=False).logits[0].float()


@functools.cache
def references(family: str, sizes: Sizes, device: str) -> list[Reference]:
    """Each text's logits in float32, and those that TORCH gives in bfloat16."""
    texts = make_texts(sizes)
    logits = []
    with attnplug.use("TORCH"):
        for dtype in (torch.float32, torch.bfloat16):
            model = FAMILIES[family].make_model(sizes, dtype, device)
            set_attention(model)
            logits.append([whole_text(model, text) for text in texts])
    return [Reference(*row) for row in zip(*logits, sizes.prompts, strict=True)]


def rules(backend: str) -> str:
    """What asks for a backend, or for "PREFILL+DECODE"."""
    prefill, plus, decode = backend.partition("+")
    return f"prefill={prefill},decode={decode}" if plus else backend


def refusal(family: str, sizes: Sizes, device: str, backend: str, run: str) -> str | None:
    """Why the backend does not serve the family's layers as that run asks for them; None where it does."""
    missing = sorted({*backend.split("+")} - {*attnplug.list_backends()})
    if missing:
        return f"{', '.join(missing)}: none of {', '.join(attnplug.list_backends())}"
    specs = FAMILIES[family].specs(sizes, direct_kv=run == "transformers")
    try:
        attnplug.plan(specs, torch.device(device), backend=rules(backend))
    except BackendUnavailableError as error:
        return " ".join(str(error).split())
    return None


def run_transformers(family: str, sizes: Sizes, device: str, backend: str) -> list[Found]:
    """All texts in one batch, padded at the left: the prompts in two passes, then a token at a time."""
    model = FAMILIES[family].make_model(sizes, torch.bfloat16, device)
    set_attention(model)
    texts = make_texts(sizes)
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=device)
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    prompts = longest - sizes.decodes
    starts = [0, sizes.piece, *range(prompts, longest)]
    logits = []
    with torch.inference_mode(), attnplug.use(rules(backend)):
        for start, end in zip(starts, [*starts[1:], longest], strict=True):
            logits.append(
                model(
                    ids[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                    past_key_values=cache,
                ).logits
            )
    assert {decision.backend for decision in attention_decisions(model).values()} == {backend}
    rows = torch.cat(logits, 1).float()
    return [Found(row[longest - len(text) :]) for row, text in zip(rows, texts, strict=True)]


def run_engine(family: str, sizes: Sizes, device: str, backend: str) -> list[Found]:
    """All texts as requests of the engine, in chunks and mixed batches; the last one's prefix is shared."""
    model = FAMILIES[family].make_model(sizes, torch.bfloat16, device)
    with attnplug.use(rules(backend)):
        return EngineRun(model, make_texts(sizes), sizes).run(backend)


@dataclasses.dataclass(eq=False)
class EngineRun:
    """An engine whose draws are replaced by what the texts say, and which computes every token's logits."""

    model: Any
    texts: Texts
    sizes: Sizes

    def __post_init__(self) -> None:
        # No block size: pages are as large as the backend chooses.
        # A replay of a graph calls no hook of the model.
        given = {"num_blocks": 1024, "max_num_batched_tokens": self.sizes.step_tokens, "graphs": False}
        self.engine = Engine(self.model, **given)
        self.query_lens: list[list[int]] = []
        self._begin, self.engine.runtime.begin_step = self.engine.runtime.begin_step, self._begin_step
        self.model.register_forward_pre_hook(self._keep_all, with_kwargs=True)
        self.model.register_forward_hook(self._record)
        self._logits: list[list[torch.Tensor]] = [[] for _ in self.texts]

    def run(self, backend: str) -> list[Found]:
        """Serve all texts."""
        engine = self.engine
        assert {decision.backend for decision in engine.runtime.plan.decisions.values()} == {backend}
        for text, prompt in zip(self.texts, self.sizes.prompts, strict=True):
            # One more than is compared: the last token drawn is never run.
            engine.add(text[:prompt], max_tokens=len(text) - prompt + 1)
        while engine.waiting or engine.running:
            for request in engine.step():
                text, drawn = self.texts[int(request.name)], len(request.tokens) - 1
                if drawn < len(text):
                    request.tokens[-1] = text[drawn]
        engine.runtime.close()
        assert any(1 in lens and max(lens) > 1 for lens in self.query_lens), "no batch was mixed"
        assert engine.pages.shared, "no page was shared"
        return [self._found(index) for index in range(len(self.texts))]

    def _begin_step(self, batch: StepBatch, **asked: Any) -> None:
        self._batch = batch
        self._begin(batch, **asked)

    def _keep_all(self, model: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._kept = named["logits_to_keep"]
        return given, {**named, "logits_to_keep": 0}

    def _record(self, model: Any, given: tuple[Any, ...], output: Any) -> Any:
        lens = self._batch.common.query_start_loc_cpu.diff().tolist()
        self.query_lens.append(lens)
        for name, rows in zip(self._batch.req_ids, output.logits[0].split(lens), strict=True):
            self._logits[int(name)].append(rows)
        output.logits = output.logits[:, self._kept]
        return output

    def _found(self, index: int) -> Found:
        rows = torch.cat(self._logits[index]).float()
        shared = len(self.texts[index]) - len(rows)
        assert 0 <= shared <= (self.sizes.shared if index == len(self.texts) - 1 else 0)
        return Found(torch.cat([rows.new_zeros(shared, rows.shape[1]), rows]), shared)


RUNS = {"transformers": run_transformers, "engine": run_engine}
