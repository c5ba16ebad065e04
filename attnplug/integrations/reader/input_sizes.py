"""Sizes of images, audio and series that a configuration, or one inside it, gives under many names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

TOKENS = (61, 37, 13)
"""Tokens of a decoder, or of a model without one; fewer where positions are few. A prime is unlikely to equal
another dimension."""
LONG = (1021, 509, 251, 127)
"""Tokens of a longer text. Some models attend otherwise in a short one; the square of 1,021 tokens has values in a run."""
_TEXT = ("text",)
_VISION = ("vision", "image", "visual", "backbone", "encoder")
_AUDIO = ("audio", "speech", "acoustic", "encoder")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Image sizes are in pixels, `mel` in bins, `audio_frames` in feature frames, `samples` in audio samples.

    `tokens` is the length of a text, `first` the number of features that the first layer with weights takes.
    """

    tokens: int
    codebooks: int
    first: int
    channels: int
    height: int
    width: int
    patch: int
    temporal_patch: int
    frames: int
    tiles: int
    mel: int
    audio_frames: int
    samples: int
    audio_channels: int
    hidden: int
    encoder_hidden: int
    text_hidden: int
    queries: int
    series: int
    series_channels: int
    time_features: int
    state: int
    action: int


def read_sizes(part: PreTrainedModel, lengths: tuple[int, ...] = TOKENS) -> Sizes:
    """The sizes in the configuration of `part`; for those that no configuration inside names, sizes that most models take.

    The text has the first of `lengths` that fits into the positions, or the first of TOKENS.
    """
    config = part.config

    def vision(default: int, *names: str) -> int:
        return _pair(_find(config, names, _VISION), default)[0]

    def audio(default: int, *names: str) -> int:
        return _pair(_find(config, names, _AUDIO), default)[0]

    height, width = _pair(_find(config, ("image_size", "img_size", "input_size"), _VISION), 224)
    hidden = audio(64, "hidden_size", "d_model", "embed_dim", "dim")
    source = _find(config, ("max_source_positions",), _AUDIO)
    frames = 2 * source if isinstance(source, int) else audio(1024, "max_length")
    series = audio(64, "context_length", "prediction_length")
    positions = _find(config, ("max_position_embeddings", "max_text_len"), _TEXT)
    limit = positions if isinstance(positions, int) else max(lengths)
    return Sizes(
        tokens=next((length for length in (*lengths, *TOKENS) if length <= limit), TOKENS[0]),
        codebooks=audio(1, "num_codebooks", "num_channels"),
        first=next(filter(None, map(_width, part.modules())), hidden),
        channels=vision(3, "num_channels", "in_channels", "in_chans", "num_image_channels"),
        height=height,
        width=width,
        patch=vision(16, "patch_size", "spatial_patch_size"),
        temporal_patch=vision(1, "temporal_patch_size"),
        frames=vision(8, "num_frames", "frames_per_clip"),
        tiles=vision(1, "max_num_tiles"),
        mel=audio(
            80,
            "num_mel_bins",
            "feature_projection_input_dim",
            "input_feat_per_channel",
            "n_mels",
            "input_dim",
            "input_feat_size",
            "feat_dim",
            "input_size",
            "model_in_dim",
        ),
        audio_frames=frames,
        samples=16000,
        audio_channels=audio(1, "audio_channels"),
        hidden=hidden,
        encoder_hidden=audio(hidden, "encoder_hidden_size", "cross_attention_hidden_size"),
        text_hidden=_pair(_find(config.get_text_config(), ("hidden_size", "d_model"), _TEXT), hidden)[0],
        queries=vision(32, "num_query_tokens", "num_queries"),
        series=series,
        series_channels=audio(1, "num_input_channels", "input_size"),
        time_features=audio(1, "num_time_features"),
        state=audio(17, "state_dim"),
        action=audio(4, "act_dim"),
    )


def _width(module: torch.nn.Module) -> int | None:
    if isinstance(module, torch.nn.LayerNorm):
        return module.normalized_shape[-1] if len(module.normalized_shape) == 1 else None
    name = {torch.nn.Linear: "in_features", torch.nn.Conv1d: "in_channels"}.get(type(module), "")
    width = getattr(module, name, None)
    return width if isinstance(width, int) else None


def _pair(value: Any, default: int) -> tuple[int, int]:
    """Height and width of a number, a list or a dictionary; of a longer list, its last two."""
    if isinstance(value, dict):
        value = [value.get("height"), value.get("width")]
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, int) for item in value):
        return (value * 2)[-2], value[-1]
    return (value, value) if isinstance(value, int) and value > 0 else (default, default)


def _find(config: PreTrainedConfig, names: tuple[str, ...], preferred: tuple[str, ...]) -> Any:
    """The first of `names` that `config` has; else of the configurations inside it, `preferred` ones first."""
    for owner in _with_parts(config, preferred):
        for name in names:
            value = getattr(owner, name, None)
            if value is not None and value is not False:
                return value
    return None


def _with_parts(config: PreTrainedConfig, preferred: tuple[str, ...]) -> Iterator[PreTrainedConfig]:
    yield config
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    for name in sorted(parts, key=lambda name: not any(word in name for word in preferred)):
        yield from _with_parts(parts[name], preferred)
