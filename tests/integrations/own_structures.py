"""Small models whose attention stands in unusual places, with a class of configuration for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

HEADS, SIZE = 4, 16
WIDTH = HEADS * SIZE


class ShapesConfig(PreTrainedConfig):
    """Positions are many, so that a longer text fits."""

    model_type = "shapes_of_tests"
    vocab_size: int = 32
    hidden_size: int = WIDTH
    num_attention_heads: int = HEADS
    num_hidden_layers: int = 3
    max_position_embeddings: int = 2048


class Mixing(nn.Module):
    """Softmax attention of its own, in a class whose name does not say so."""

    def __init__(self, scale: float = SIZE**-0.5, window: int | None = None) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.scale = scale
        self.all_three, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if window is not None:
            causal = torch.tril(torch.ones(2048, 2048, dtype=torch.bool))
            self.seen = nn.Buffer(causal ^ torch.tril(causal, -window), persistent=False)

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, [B, H, T, D]."""
        parts = self.all_three(hidden).chunk(3, dim=-1)
        return tuple(part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in parts)

    def logits(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """[B, H, T, T]."""
        return query @ key.transpose(-2, -1) * self.scale

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[B, H, T, D]."""
        return self.logits(query, key).softmax(dim=-1) @ value

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.out(self.attend(*self.heads(hidden)).transpose(1, 2).flatten(2))


class TwoFactors(Mixing):
    """Scales its queries, then its keys, then its logits."""

    def logits(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query * 0.5) @ (key / 4.0).transpose(-2, -1) / 2


class Flattened(Mixing):
    """Folds its heads into its batch, and multiplies by bmm."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.flatten(0, 1) for part in (query, key, value))
        weights = torch.nn.functional.softmax(torch.bmm(query, key.transpose(1, 2)) * self.scale, dim=-1)
        return torch.bmm(weights, value).unflatten(0, (-1, HEADS))


class Fused(Mixing):
    """Calls torch's own function."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)


class Windowed(Mixing):
    """Hides keys by a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__(window=200)

    def logits(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        tokens = query.shape[-2]
        return (
            super()
            .logits(query, key)
            .masked_fill(~self.seen[:tokens, :tokens], torch.finfo(torch.float32).min)
        )


class WindowOfBuffer(Windowed):
    """Hides keys by `where`, as older decoders do."""

    def logits(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = self.seen[: query.shape[-2], : query.shape[-2]]
        return torch.where(seen, Mixing.logits(self, query, key), -1e9)


class Biased(Mixing):
    """Adds a number for each distance."""

    def logits(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        places = torch.arange(query.shape[-2])
        return super().logits(query, key) + ((places[:, None] - places) * 0.1).to(query.dtype)


class Capped(Mixing):
    """Changes its logits by a function that is not followed."""

    def logits(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().logits(query, key))


class Reweighted(Mixing):
    """Changes its weights after the softmax."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (self.logits(query, key).softmax(dim=-1) * 0.5) @ value


class Einstein(Mixing):
    """Names no product that is followed."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        weights = torch.einsum("bhqd,bhkd->bhqk", query, key).softmax(dim=-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, value)


class OverChannels(Mixing):
    """Mixes channels: its keys are not tokens."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.transpose(-2, -1) for part in (query, key, value))
        return (self.logits(query, key).softmax(dim=-1) @ value).transpose(-2, -1)


class SetsSome(Mixing):
    """Hides the first key from all queries but the first, in place."""

    def logits(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        logits = super().logits(query, key)
        logits[..., 1:, 0] = -1e9
        return logits


class SetsInView(Mixing):
    """Hides keys in a view of its logits."""

    def logits(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        logits = super().logits(query, key)
        logits.flatten(0, 1).masked_fill_(
            torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool).triu(1), -1e9
        )
        return logits


class WithSink(Mixing):
    """Adds a column to its logits."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        logits = self.logits(query, key)
        return torch.cat([logits, logits[..., :1] * 0], dim=-1).softmax(dim=-1)[..., :-1] @ value


class SkipsKeys(Mixing):
    """Attends to all keys but the first."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.logits(query, key)[..., 1:].softmax(dim=-1) @ value[..., 1:, :]


class Copies(Mixing):
    """Has two KV heads, and copies each for two query heads."""

    num_key_value_heads = 2

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (part[:, :2].repeat_interleave(2, dim=1) for part in (key, value))
        return super().attend(query, key, value)


class BlocksOfLongTexts(Mixing):
    """Attends to all of a short text, and to blocks of 100 tokens of a longer one."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if query.shape[-2] <= 100:
            return super().attend(query, key, value)
        parts = (part[..., : part.shape[-2] // 100 * 100, :] for part in (query, key, value))
        return super().attend(*(part.unflatten(2, (-1, 100)) for part in parts)).flatten(2, 3)


class ShapesModel(PreTrainedModel):
    """Embeds its tokens; subclasses add what reads them."""

    config: ShapesConfig
    config_class = ShapesConfig
    base_model_prefix = "model"

    def __init__(self, config: ShapesConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, WIDTH)
        self.make(config)
        self.post_init()

    def make(self, config: ShapesConfig) -> None:
        """Add the parts."""

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the parts."""
        return hidden

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.run(self.embed(input_ids))


def stack_of(block: type[Mixing], count: int = 3) -> type[ShapesModel]:
    """A model whose blocks are in a Sequential of a ModuleDict, which iterates over them."""

    class Stack(ShapesModel):
        def make(self, config: ShapesConfig) -> None:
            self.parts = nn.ModuleDict({"trunk": nn.Sequential(*(block() for _ in range(count)))})

        def run(self, hidden: torch.Tensor) -> torch.Tensor:
            for each in self.parts["trunk"]:
                hidden = each(hidden)
            return hidden

    return Stack


class Nest(nn.Module):
    """Has no forward of its own: its model runs what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = Mixing(), nn.ModuleList([nn.Sequential(Mixing(), nn.Identity())])


class NestedModel(ShapesModel):
    """Blocks in a module without a forward, in a list of Sequentials."""

    def make(self, config: ShapesConfig) -> None:
        self.nest = Nest()

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.nest.first(hidden)
        for each in self.nest.rest:
            hidden = each(hidden)
        return hidden


class Bridge(nn.Module):
    """A projector whose name says nothing, with attention inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.out = inside, nn.Linear(WIDTH, WIDTH)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.out(self.inside(features))


def bridged(inside: Any) -> type[ShapesModel]:
    """A model with a projector that a run on text does not reach."""

    class Bridged(stack_of(Mixing, 1)):  # type: ignore[misc]
        def make(self, config: ShapesConfig) -> None:
            super().make(config)
            self.bridge = Bridge(inside())

    return Bridged


class Lens(PreTrainedModel):
    """A tower under an unusual name, which reads features."""

    config_class = ShapesConfig
    main_input_name = "hidden_states"

    def __init__(self, config: ShapesConfig) -> None:
        super().__init__(config)
        self.ground = nn.Sequential(Mixing(), Mixing())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for glass in self.ground:
            hidden_states = glass(hidden_states)
        return hidden_states


class BlindLens(Lens):
    """Fails before it attends."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise ValueError("no light")


def looking_through(lens: type[Lens]) -> type[ShapesModel]:
    """A model with a tower that a run on text does not reach, inside a module of another kind."""

    class Looking(stack_of(Mixing, 1)):  # type: ignore[misc]
        def make(self, config: ShapesConfig) -> None:
            super().make(config)
            self.frame = nn.ModuleDict({"left": lens(config)})

    return Looking


class SkippingModel(ShapesModel):
    """Skips one of its blocks."""

    def make(self, config: ShapesConfig) -> None:
        self.trunk = nn.Sequential(Mixing(), Mixing())

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.trunk[0](hidden)


class Squeeze(nn.Module):
    """Convolutions and a pool: a part that cannot attend."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, WIDTH, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)


class VisionSqueezeEncoder(Squeeze):
    """The same under the name of a tower."""


class PlainlySeeing(stack_of(Mixing, 1)):  # type: ignore[misc]
    """A model with a tower that has no attention."""

    def make(self, config: ShapesConfig) -> None:
        super().make(config)
        self.vision = VisionSqueezeEncoder()
        self.squeeze = Squeeze()


class MambaBeside(nn.Module):
    """A mixer of another kind, beside attention that did not run."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.spare = nn.Linear(WIDTH, WIDTH), Mixing()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mixer(hidden)


class TorchsEncoder(ShapesModel):
    """Layers of torch's own."""

    def make(self, config: ShapesConfig) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.encoder(hidden)


class Attend(nn.Module):
    """The products alone, without weights; named as no attention is."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        weights = nn.Softmax(dim=-1)(torch.matmul(query, key.transpose(-1, -2)) / SIZE**0.5)
        return torch.matmul(nn.functional.dropout(weights, 0.5, training=self.training), value)


class Outsourced(Mixing):
    """Leaves the products to a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.products = Attend()

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.products(query, key, value)
