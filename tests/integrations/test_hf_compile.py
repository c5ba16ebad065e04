"""A compiled model gives eager attention's logits: its graphs break around attention and around the mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hf_models import DECODERS, ENCODERS, assert_same_logits, prompts
from transformers import masking_utils

from attnplug.errors import BatchError, ModelConfigError
from attnplug.integrations.attention.registration import attention_mask
from attnplug.integrations.transformers import attention_decisions

SHAPES = ((3, 21), (2, 13), (1, 30))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def assert_compiled_logits(name: str, backend: str, **changes: Any) -> None:
    ours, eager = {**DECODERS, **ENCODERS}[name].pair(**changes)
    compiled = torch.compile(ours, backend=backend)
    for rows, length in SHAPES:
        ids, mask = prompts(rows, length)
        assert_same_logits(
            compiled(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits, mask
        )
        assert_same_logits(compiled(ids).logits, eager(ids).logits)
    assert len(attention_decisions(ours)) == ours.config.num_hidden_layers


def counting(graphs: list[int]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    return backend


def test_a_compiled_decoder_gives_eagers_logits() -> None:
    ours, eager = DECODERS["llama"].pair(num_hidden_layers=1)
    graphs: list[int] = []
    compiled = torch.compile(ours, backend=counting(graphs))
    for rows, length in SHAPES[:2]:
        ids, mask = prompts(rows, length)
        found, expected = (model(ids, attention_mask=mask).logits for model in (compiled, eager))
        assert_same_logits(found, expected, mask)
    assert sum(graphs) > 20  # operations of the model, outside of attention
    assert list(attention_decisions(ours)) == ["model.layers.0.self_attn"]


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("name", sorted({**DECODERS, **ENCODERS}))
def test_each_family_compiled_gives_eagers_logits(name: str) -> None:
    assert_compiled_logits(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_gives_eagers_logits() -> None:
    assert_compiled_logits("llama", "inductor", num_hidden_layers=1)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_of_a_compiled_forward_are_eagers(cache: str) -> None:
    ours, eager = DECODERS["gemma2"].pair(num_hidden_layers=2)
    ids, mask = prompts()
    ours.forward = torch.compile(ours.forward, backend="eager")
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    if cache == "static":
        arguments["cache_implementation"] = "static"
    found, expected = (model.generate(ids, **arguments) for model in (ours, eager))
    assert found.tolist() == expected.tolist()


def test_a_compiled_model_refuses_what_the_model_refuses() -> None:
    ours, _ = DECODERS["llama"].pair(num_hidden_layers=1)
    ids, _ = prompts()
    compiled = torch.compile(ours, backend="eager")
    with pytest.raises(BatchError, match="output_attentions=True"):
        compiled(ids, output_attentions=True)
    positions = torch.cat([torch.arange(9), torch.arange(12)])[None].expand(3, -1)
    with pytest.raises(BatchError, match="position_ids"):
        compiled(ids, position_ids=positions)


class Own(torch.nn.Module):
    """Self-attention that never calls the interface."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(size, 3 * size)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        parts = self.qkv(hidden_states).chunk(3, dim=-1)
        return torch.nn.functional.scaled_dot_product_attention(*parts), None


@pytest.mark.slow
def test_an_unserved_layer_of_a_compiled_model_is_named() -> None:
    ours, _ = DECODERS["llama"].pair(num_hidden_layers=2)
    ours.model.layers[1].self_attn = Own(64)
    with pytest.raises(ModelConfigError, match=r"model\.layers\.1\.self_attn \(Own\)"):
        torch.compile(ours, backend="eager")(prompts()[0])


KEPT = {
    "to": lambda mask: mask.to("cpu"),
    "all keys": lambda mask: mask[:, :, :, :5],
    "itself": lambda mask: mask,
}
ALTERED = {
    "bias": lambda mask: mask + torch.ones(1, 1, 3, 5),
    "slice": lambda mask: mask[:, :, :, :4],
    "where": lambda mask: torch.where(mask, 0.0, -1.0),
    "fill": lambda mask: torch.zeros(2, 1, 3, 5).masked_fill(mask, -1.0),
}


def make_mask() -> Any:
    return attention_mask(2, 3, 5, 2, 0, masking_utils.causal_mask_function)


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("aot_eager", marks=[pytest.mark.slow, pytest.mark.rare])]
)
@pytest.mark.parametrize("name", sorted(KEPT))
def test_a_graph_that_passes_a_mask_on_keeps_its_pattern(name: str, backend: str) -> None:
    def step(mask: Any, values: torch.Tensor) -> Any:
        return KEPT[name](mask), values + mask.shape[-1]

    compiled = torch.compile(step, backend=backend)
    for _ in range(2):
        mask = make_mask()
        kept, values = compiled(mask, torch.ones(2))
        assert kept.step is mask.step
        assert values.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("name", sorted(ALTERED))
def test_a_graph_that_alters_a_mask_is_refused(name: str) -> None:
    def step(mask: Any, values: torch.Tensor) -> Any:
        return ALTERED[name](mask), values + 1

    with pytest.raises(BatchError, match="attention_mask='changed by"):
        torch.compile(step, backend="aot_eager")(make_mask(), torch.ones(2))
