"""Weights for an engine's model with which attention finds each token, by margins that no rounding reaches.

A token's number is written in bits of 1 and -1. In each layer that sees all tokens, every head looks for the token of the
prompt whose number differs from the last one found in the bits of the layer, anywhere in the prompt. That token holds another
number, which is found. In a layer with a window a token finds itself, and passes on what it holds. The number found last
gives the next token. A third of the heads look for another token, and what they find is not used. So a wrong or missing
page, a wrong position or head gives other tokens, and `Plan.follow` says which are right. If tokens held their own numbers,
the mean of those most alike would stand in for a missing one. Random weights would not do: the two likeliest of 100,000
random tokens are closer than two correct kernels are.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

LOAD_FORMAT = "attnplug_lookup"
SLOT, FLAG, ONE = 16, 14, 15
"""Elements of a number in the hidden state: up to 14 bits, whether it is a prompt's, and a large constant."""
BLOCK = 32
"""Numbers that layers and tokens change among themselves, so that a prompt of any length has all of them."""
MATCH = 150.0
"""Attention's logit for the token that is looked for; the next best has 13/15 of it."""
_DRAW = random.Random(1)  # noqa: S311
_SHUFFLED = _DRAW.sample(range(BLOCK), BLOCK)
_TURNS = [_DRAW.randrange(BLOCK) for _ in range((1 << FLAG) // BLOCK)]
NOISE = 1e-5
"""The value of all other weights, because a GPU multiplies zeros at less power."""


def held(number: int) -> int:
    """The number that a prompt's token holds: one of its block, without a likeness to what similar tokens hold."""
    block, place = divmod(number, BLOCK)
    return block * BLOCK + _SHUFFLED[place ^ _TURNS[block]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The number that the layers look for.

    Args:
        bits: of a number.
        masks: for each layer the bits to change, or 0 in a layer with a window.
    """

    bits: int
    masks: tuple[int, ...]

    @property
    def constant(self) -> float:
        """It is most of each hidden state, so that all have about the same norm for every number that is found."""
        return 2.0 ** math.ceil(math.log2(8 * self.bits * (len(self.masks) + 1)) / 2)

    @classmethod
    def of(cls, config: Any) -> Plan:
        """The plan for a configuration of transformers."""
        draw = random.Random(0)  # noqa: S311
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        masks = [draw.randrange(1, BLOCK) if kind == "full_attention" else 0 for kind in kinds]
        return cls(min(FLAG, (config.vocab_size // 2).bit_length() - 1), tuple(masks))

    def prompt(self, length: int, draw: random.Random) -> list[int]:
        """Tokens `0 .. length - 1` in random order; those of the last, incomplete block are not the last of the prompt.

        Raises:
            ValueError: too few tokens for a block, or more than the numbers have bits for.
        """
        if not BLOCK <= length <= 1 << self.bits:
            raise ValueError(f"prompts need {BLOCK} to {1 << self.bits} tokens here, not {length}")
        whole = length // BLOCK * BLOCK
        *first, last = draw.sample(range(whole), whole)
        rest = [*first, *range(whole, length)]
        draw.shuffle(rest)
        return [*rest, last]

    def next(self, token: int) -> int:
        """The token after `token`: each layer changes the number, and the last step goes through a block's numbers."""
        number = token % (1 << self.bits)
        for mask in filter(None, self.masks):
            number = held(number ^ mask)
        return (1 << self.bits) + number - number % BLOCK + (5 * number + 3) % BLOCK

    def follow(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens after those of a prompt."""
        found = [tokens[-1]]
        for _ in range(count):
            found.append(self.next(found[-1]))
        return found[1:]


@torch.no_grad()
def fill(model: torch.nn.Module, config: Any, rank: int = 0, ranks: int = 1) -> None:
    """Fill the parameters of an engine's model for `config` in place; vLLM and SGLang name its parts alike.

    Args:
        model: of the engine.
        config: of transformers.
        rank: of this process among those that share each layer's heads and the vocabulary.
        ranks: how many share them.

    Raises:
        ValueError: a hidden state that has no place for the numbers of all layers.
    """
    plan, hidden = Plan.of(config), config.hidden_size
    if hidden < SLOT * (len(plan.masks) + 2):
        raise ValueError(f"hidden_size {hidden} has no place for the numbers of {len(plan.masks)} layers")
    for module, name, weight in _parameters(model):
        gemma = "Gemma" in type(module).__name__
        if "Norm" in type(module).__name__:
            weight.fill_(0.0 if gemma else 1.0)
        elif weight.ndim > 1:
            weight.normal_(0.0, NOISE)
        elif name == "sinks":
            # Larger sinks would take a part of each layer's values, and the last layers would get nothing.
            weight.fill_(MATCH / 2.0)
        else:
            weight.zero_()
    tables = [
        module
        for module in model.modules()
        if "Embedding" in type(module).__name__ and hasattr(module, "weight")
    ]
    table, size = tables[0].weight, hidden**-0.5 if "gemma" in config.model_type else 1.0
    _numbers(table, plan, size, rank * len(table))
    [head] = [module for module in model.modules() if "LMHead" in type(module).__name__]
    _outcomes(head.weight, plan, rank * len(head.weight))
    layers = [module for module in model.modules() if hasattr(module, "qkv_proj")]
    for index, layer in enumerate(layers):
        _look_up(layer, index, plan, config, rank, ranks)
    latent = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    for index, layer in enumerate(each for each in latent if hasattr(each, "kv_a_proj_with_mqa")):
        _look_up_latents(layer, index, plan, config, rank, ranks)
    for name, module in model.named_modules():
        # Gemma norms what a part of a layer adds.
        if name.endswith("post_feedforward_layernorm"):
            module.weight.fill_(-1.0)
        elif name.endswith("post_attention_layernorm") and "Gemma" in type(module).__name__:
            module.weight.fill_((plan.bits / hidden) ** 0.5 - 1.0)


def _parameters(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_floating_point():
                yield module, name, weight


def _signs(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The bits of numbers `[N]` as 1 and -1, `[N, bits]`."""
    return 1.0 - 2.0 * (numbers[:, None] >> torch.arange(bits, device=numbers.device) & 1)


def _numbers(table: torch.Tensor, plan: Plan, size: float, first: int) -> None:
    """Embeddings: a token's number, whether it is a prompt's, the constant, and in the last slot the number that it holds.

    The first row is that of the token `first`.
    """
    many = 1 << plan.bits
    tokens = torch.arange(first, max(first, min(2 * many, first + len(table))), device=table.device)
    rows = torch.zeros(len(tokens), SLOT, device=table.device)
    rows[:, : plan.bits] = _signs(tokens % many, plan.bits)
    rows[:, FLAG] = torch.where(tokens < many, 1.0, -1.0)
    rows[:, ONE] = plan.constant
    table[: len(tokens), :SLOT] = (rows * size).to(table.dtype)
    holds = torch.tensor([held(number) for number in range(many)], device=table.device)[tokens % many]
    place = SLOT * (len(plan.masks) + 1)
    table[: len(tokens), place : place + plan.bits] = (_signs(holds, plan.bits) * size).to(table.dtype)


def _outcomes(head: torch.Tensor, plan: Plan, first: int) -> None:
    """The last layer's number as the token that follows from it; the first row is that of the token `first`."""
    alone, many = Plan(plan.bits, ()), 1 << plan.bits
    tokens = torch.tensor([alone.next(number) for number in range(many)], device=head.device)
    place = SLOT * len(plan.masks)
    signs = _signs(torch.arange(many, device=head.device), plan.bits)
    own = (tokens >= first) & (tokens < first + len(head))
    head[tokens[own] - first, place : place + plan.bits] = signs[own].to(head.dtype)


def _is_used(head: int) -> bool:
    """Whether what a head finds counts: where heads or ranks change places, some that count and some that do not do so."""
    return head % 3 != 2


def _rms(index: int, plan: Plan, config: Any) -> float:
    """What the norm before a layer divides by: the hidden state has the numbers that earlier layers have found."""
    return float(((plan.constant**2 + 1 + plan.bits * (2 + index)) / config.hidden_size) ** 0.5)


def _pass_on(out: torch.Tensor, place: int, plan: Plan, size: int, own: range, ranks: int) -> None:
    """Add the bits that heads have found at a place of the hidden state; `own` are this rank's heads of `size` elements."""
    used = [head for head in range(len(own) * ranks) if _is_used(head)]
    carriers = min(plan.bits, len(used))
    for bit in range(plan.bits):
        found = used[bit % carriers :: carriers]
        for head in found:
            if head in own:
                out[place + bit, (head - own.start) * size + bit] = 1.0 / len(found)


def _look_up(layer: Any, index: int, plan: Plan, config: Any, rank: int, ranks: int) -> None:
    """The projections of a layer: it reads the number of slot `index`, and writes to the next one."""
    size, heads = layer.head_dim, config.num_attention_heads // ranks
    # Ranks without a KV head of their own have a copy.
    kv_heads = max(1, config.num_key_value_heads // ranks)
    bits, mask, rms = plan.bits, plan.masks[index], _rms(index, plan, config)
    scale = (getattr(config, "query_pre_attn_scalar", None) or size) ** -0.5
    large = (MATCH / ((bits + 1) * scale)) ** 0.5
    # The pairs that rotary embedding turns least, so that a token is found anywhere.
    half = SLOT // 2
    dims = [*range(size // 2 - half, size // 2), *range(size - half, size)]
    qkv, out = layer.qkv_proj.weight, layer.o_proj.weight
    for head in range(heads + 2 * kv_heads):
        rows = qkv[head * size : (head + 1) * size]
        is_query, is_value = head < heads, head >= heads + kv_heads
        flips = mask if _is_used(rank * heads + head) else mask ^ 1
        place = SLOT * index if (is_query if mask else is_value) else 0
        if mask and is_value:
            place = SLOT * (len(plan.masks) + 1)
        for bit in range(bits):
            if is_value:
                rows[bit, place + bit] = rms
            else:
                flip = is_query and flips >> bit & 1
                rows[dims[bit], place + bit] = (-large if flip else large) * rms
        if not is_value:
            # If two tokens have one number, layers that see all want the prompt's.
            if is_query and mask:
                rows[dims[FLAG], ONE] = large * rms / plan.constant
            else:
                rows[dims[FLAG], FLAG] = large * rms
    _pass_on(out, SLOT * (index + 1), plan, size, range(rank * heads, (rank + 1) * heads), ranks)
    for norm in (getattr(layer, name, None) for name in ("q_norm", "k_norm")):
        if norm is not None:
            weight = large * ((bits + 1) / size) ** 0.5
            norm.weight.fill_(weight - 1.0 if "Gemma" in type(norm).__name__ else weight)


def _look_up_latents(layer: Any, index: int, plan: Plan, config: Any, rank: int, ranks: int) -> None:
    """As `_look_up`, of a layer whose latents have a token's number and what it holds; rotary dims have none of it."""
    nope, size_v, heads = layer.qk_nope_head_dim, layer.v_head_dim, config.num_attention_heads // ranks
    size, bits, rms = nope + layer.qk_rope_head_dim, plan.bits, _rms(index, plan, config)
    large = (MATCH / ((bits + 1) * layer.scaling)) ** 0.5
    # The norm of latents divides by this.
    norm = ((2 * bits + 1) / config.kv_lora_rank) ** 0.5
    query, latent, back = (each.weight for each in (layer.q_proj, layer.kv_a_proj_with_mqa, layer.kv_b_proj))
    latent[FLAG, FLAG] = rms
    for bit in range(bits):
        latent[bit, bit] = latent[SLOT + bit, SLOT * (len(plan.masks) + 1) + bit] = rms
    own = range(rank * heads, (rank + 1) * heads)
    for number, head in enumerate(own):
        rows, keys = query[number * size :], back[number * (nope + size_v) :]
        mask = plan.masks[index] if _is_used(head) else plan.masks[index] ^ 1
        rows[FLAG, ONE] = large * rms / plan.constant
        keys[FLAG, FLAG] = large * norm
        for bit in range(bits):
            rows[bit, SLOT * index + bit] = (-large if mask >> bit & 1 else large) * rms
            keys[bit, bit] = large * norm
            keys[nope + bit, SLOT + bit] = norm
    _pass_on(layer.o_proj.weight, SLOT * (index + 1), plan, size_v, own, ranks)
