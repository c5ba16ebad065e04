"""Inputs for one run of a model, by the names in its forward's signature and the sizes in its configuration.

A configuration, or one inside it, gives sizes of images, audio and series under many names.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnplug.core.errors import ModelConfigError

# A prime is unlikely to equal another dimension.
TOKENS = (61, 37, 13)
"""Tokens of a decoder, or of a model without one; fewer where positions are few."""
# Some models attend otherwise in a short text. The square of 1,021 tokens has values in a run.
LONG = (1021, 509, 251, 127)
"""Tokens of a longer text."""
_TEXT = ("text",)
_VISION = ("vision", "image", "visual", "backbone", "encoder")
_AUDIO = ("audio", "speech", "acoustic", "encoder")


def _named(default: int, preferred: tuple[str, ...], *names: str) -> Any:
    """A size under any of `names`, first in configurations of `preferred` names."""
    return dataclasses.field(default=default, metadata={"named": (default, preferred, *names)})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Image sizes are in pixels, `mel` in bins, `audio_frames` in feature frames, `samples` in audio samples.

    `tokens` is the length of a text, `first` the number of features that the first layer with weights takes. The
    defaults are sizes that most models take.
    """

    tokens: int
    first: int
    height: int
    width: int
    audio_frames: int
    hidden: int
    encoder_hidden: int
    text_hidden: int
    series: int
    samples: int = 16000
    codebooks: int = _named(1, _AUDIO, "num_codebooks", "num_channels")
    channels: int = _named(3, _VISION, "num_channels", "in_channels", "in_chans", "num_image_channels")
    patch: int = _named(16, _VISION, "patch_size", "spatial_patch_size")
    temporal_patch: int = _named(1, _VISION, "temporal_patch_size")
    frames: int = _named(8, _VISION, "num_frames", "frames_per_clip")
    tiles: int = _named(1, _VISION, "max_num_tiles")
    mel: int = _named(
        80,
        _AUDIO,
        *("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "n_mels", "input_dim"),
        *("input_feat_size", "feat_dim", "input_size", "model_in_dim"),
    )
    audio_channels: int = _named(1, _AUDIO, "audio_channels")
    queries: int = _named(32, _VISION, "num_query_tokens", "num_queries")
    series_channels: int = _named(1, _AUDIO, "num_input_channels", "input_size")
    time_features: int = _named(1, _AUDIO, "num_time_features")
    state: int = _named(17, _AUDIO, "state_dim")
    action: int = _named(4, _AUDIO, "act_dim")


def read_sizes(part: PreTrainedModel, lengths: tuple[int, ...] = TOKENS) -> Sizes:
    """The sizes in the configuration of `part`, or in those inside it.

    The text has the first of `lengths` that fits into the positions, or the first of TOKENS.
    """
    config = part.config

    found = {
        each.name: _size(config, *each.metadata["named"])
        for each in dataclasses.fields(Sizes)
        if each.metadata
    }
    height, width = _pair(_find(config, ("image_size", "img_size", "input_size"), _VISION), 224)
    hidden = _size(config, 64, _AUDIO, "hidden_size", "d_model", "embed_dim", "dim")
    source = _find(config, ("max_source_positions",), _AUDIO)
    positions = _find(config, ("max_position_embeddings", "max_text_len"), _TEXT)
    limit = positions if isinstance(positions, int) else max(lengths)
    return Sizes(
        **found,
        tokens=next((length for length in (*lengths, *TOKENS) if length <= limit), TOKENS[0]),
        first=next(filter(None, map(_width, part.modules())), hidden),
        height=height,
        width=width,
        audio_frames=2 * source if isinstance(source, int) else _size(config, 1024, _AUDIO, "max_length"),
        hidden=hidden,
        encoder_hidden=_size(config, hidden, _AUDIO, "encoder_hidden_size", "cross_attention_hidden_size"),
        text_hidden=_size(config.get_text_config(), hidden, _TEXT, "hidden_size", "d_model"),
        series=_size(config, 64, _AUDIO, "context_length", "prediction_length"),
    )


def _size(config: PreTrainedConfig, default: int, preferred: tuple[str, ...], *names: str) -> int:
    return _pair(_find(config, names, preferred), default)[0]


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


_ENCODER_LENGTH = 43
"""Tokens of an encoder whose output a decoder reads."""
_GRID = (12, 12)
"""Patches of an image given as patches: whole windows and merged squares of every known family."""
_FRAMES = 400
"""Frames of audio for models without a number of their own."""
_PATCHES = _GRID[0] * _GRID[1]

Shape = tuple[int, ...]
Table = Mapping[str, Callable[[Sizes], list[Shape]]]


def _images(s: Sizes) -> list[Shape]:
    image = (s.channels, s.height, s.width)
    patch = s.channels * s.patch * s.patch
    return [
        (1, *image),
        (1, 1, *image),
        (1, s.frames, *image),
        (1, _PATCHES, patch),
        (_PATCHES, s.temporal_patch * patch),
        (1, 1, s.tiles, *image),
        (1, 2, *image),
        (_PATCHES, s.channels, s.patch, s.patch),
    ]


def _features(s: Sizes) -> list[Shape]:
    return [
        (1, s.mel, _FRAMES),
        (1, _FRAMES, s.mel),
        (1, s.mel, s.audio_frames),
        (1, s.audio_frames, s.mel),
        (1, 1, s.audio_frames, s.mel),
        (s.mel, s.audio_frames),
        (1, _FRAMES, s.first),
    ]


def _feature_masks(s: Sizes) -> list[Shape]:
    short, long = (1, _FRAMES), (1, s.audio_frames)
    return [short, short, long, long, long, long, short]


def _samples(s: Sizes) -> list[Shape]:
    return [(1, s.samples), (1, s.audio_channels, s.samples), (1, s.audio_frames, s.mel)]


def _states(s: Sizes) -> list[Shape]:
    packed = (_PATCHES, s.channels * s.temporal_patch * s.patch * s.patch)
    return [
        (1, s.tokens, s.hidden),
        packed,
        (1, s.hidden, s.tokens),
        (1, s.tokens, s.first),
        (_PATCHES, s.hidden),
    ]


def _ids_of_text(s: Sizes) -> list[Shape]:
    return [
        (1, s.tokens),
        (1, s.tokens),
        (s.codebooks, s.tokens),
        (1, s.tokens, s.codebooks),
        (1, s.codebooks, s.tokens),
    ]


def _series(s: Sizes) -> list[Shape]:
    return [(1, s.series, s.series_channels), (1, s.series)]


_FLOATS: Table = {
    **dict.fromkeys(("pixel_values", "image", "images", "prompt_pixel_values", "prompt_masks"), _images),
    "pixel_values_videos": lambda s: [(1, s.frames, s.channels, s.height, s.width), *_images(s)[4:5]],
    "flattened_patches": lambda s: [(1, _PATCHES, s.channels * s.patch * s.patch + 2)],
    **dict.fromkeys(("input_features", "audio_mel", "mel_spectrogram"), _features),
    "spectrogram": lambda s: [(1, s.audio_frames, s.mel)],
    "input_values": _samples,
    "hidden_states": _states,
    "inputs_embeds": lambda s: [(1, s.tokens, s.hidden)],
    "query_embeds": lambda s: [(1, s.queries, s.hidden)],
    "context": lambda s: [(1, _ENCODER_LENGTH, s.hidden)],
    **dict.fromkeys(("past_values", "past_observed_mask"), _series),
    "past_time_features": lambda s: [(1, s.series, s.time_features)],
    "states": lambda s: [(1, s.tokens, s.state)],
    "actions": lambda s: [(1, s.tokens, s.action)],
    **dict.fromkeys(("rewards", "returns_to_go"), lambda s: [(1, s.tokens, 1)]),
    "encoder_hidden_states": lambda s: [(1, _ENCODER_LENGTH, s.encoder_hidden)],
    "cross_attention_states": lambda s: [(1, _ENCODER_LENGTH, s.text_hidden)],
}
"""Inputs of floating-point numbers; each list has the layouts to try, in the same order for every name."""

_ONES: Table = {
    **dict.fromkeys(
        ("pixel_mask", "pixel_attention_mask"),
        lambda s: [each[:-3] + each[-2:] if len(each) > 3 else (1, _PATCHES) for each in _images(s)],
    ),
    "patch_attention_mask": lambda s: [(1, s.height // s.patch, s.width // s.patch)],
    **dict.fromkeys(
        ("input_features_mask", "feature_attention_mask", "mask", "audio_mel_mask"), _feature_masks
    ),
    "padding_mask": _samples,
    "past_values_padding": _series,
}
_IDS: Table = {
    **dict.fromkeys(("input_ids", "decoder_input_ids"), _ids_of_text),
    **dict.fromkeys(("qformer_input_ids", "task_inputs"), lambda _: [(1, _ENCODER_LENGTH)]),
    "bbox": lambda s: [(1, s.tokens, 4)],
    "timesteps": lambda s: [(1, s.tokens)],
    "freq": lambda _: [(1, 1)],
}
_VALUES: Mapping[str, tuple[str, Callable[[Sizes], Any]]] = {
    **dict.fromkeys(("grid_thw", "image_grid_thw"), ("pixel_values", lambda _: [[1, *_GRID]])),
    **dict.fromkeys(("spatial_shapes", "target_sizes"), ("pixel_values", lambda _: [[*_GRID]])),
    "merge_sizes": ("pixel_values", lambda _: [1]),
    "image_sizes": ("pixel_values", lambda s: [[s.height, s.width]]),
    **dict.fromkeys(
        ("pixel_position_ids", "image_position_ids"),
        ("pixel_values", lambda _: [[[x, y] for y in range(_GRID[0]) for x in range(_GRID[1])]]),
    ),
    "aspect_ratio_ids": ("pixel_values", lambda _: [[1]]),
    "aspect_ratio_mask": ("pixel_values", lambda s: [[[1] * s.tiles]]),
    "feature_lens": ("input_features", lambda s: [s.audio_frames]),
    "aftercnn_lens": ("input_features", lambda s: [(s.audio_frames - 1) // 2 + 1]),
}
"""Inputs whose values matter, and the input that they accompany."""
_MADE_OF_PATCHES = ("grid_thw", "image_grid_thw", "spatial_shapes", "target_sizes", "pixel_position_ids")
_LAYOUTS = 8


def encoder_tokens(tokens: int) -> int:
    """Tokens of an encoder beside a decoder of `tokens`."""
    return min(_ENCODER_LENGTH, tokens - 2) if tokens <= max(TOKENS) else tokens - 2


def input_attempts(part: Any, is_whole: bool, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Keyword arguments of `sizes` to try in turn until `part` runs, the most informative first.

    The main input and what the signature requires come first, then every input of the signature whose shape
    is known. Other inputs have several layouts. `is_whole` is False for a tower of a larger model.
    """
    accepted = {
        name: parameter
        for name, parameter in inspect.signature(part.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD or parameter.kind is parameter.KEYWORD_ONLY
    }
    config = part.config
    dtype = next((p.dtype for p in part.parameters() if p.is_floating_point()), torch.float32)
    main = part.main_input_name
    needed = {main} if isinstance(main, str) else set(main)
    needed |= {name for name, parameter in accepted.items() if parameter.default is parameter.empty}
    for name in needed & set(accepted):
        annotation = accepted[name].annotation
        if not re.search("Tensor|_empty|tuple|list", str(annotation)):
            kind = getattr(annotation, "__name__", annotation)
            raise ModelConfigError(
                f"{type(part).__name__} needs the input {name}, a {kind}, which the reader cannot make"
            )
    is_packed = any(name in accepted for name in _MADE_OF_PATCHES)
    layouts = sorted(range(_LAYOUTS), key=lambda layout: is_packed and layout not in (3, 4, 7))
    tried: set[str] = set()
    # States of an encoder take the place of the images from which a model computes them.
    states = {"cross_attention_states"} & set(accepted)
    choices = [needed, needed | states, needed | set(accepted) - {"inputs_embeds"} - states]
    if "inputs_embeds" in accepted:
        choices.append(needed - {"input_ids"} | {"inputs_embeds"})
    for wanted in choices:
        for layout in layouts:
            given = _inputs(wanted, accepted, config, sizes, dtype, layout)
            for inputs in _variants(given, accepted, config, dtype, is_whole):
                shapes = repr({name: getattr(v, "shape", v) for name, v in sorted(inputs.items())})
                if shapes not in tried:
                    tried.add(shapes)
                    yield inputs


def _inputs(
    wanted: set[str],
    accepted: Mapping[str, inspect.Parameter],
    config: PreTrainedConfig,
    sizes: Sizes,
    dtype: torch.dtype,
    layout: int,
) -> dict[str, Any]:
    def shape(table: Table, name: str) -> Shape:
        shapes = table[name](sizes)
        return shapes[min(layout, len(shapes) - 1)]

    given: dict[str, Any] = {}
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:
        wanted = wanted | {"decoder_input_ids"}
    for name in (n for n in accepted if n in wanted):
        if name in _FLOATS:
            given[name] = torch.zeros(shape(_FLOATS, name), dtype=dtype, device="meta")
        elif name in _ONES:
            given[name] = torch.ones(shape(_ONES, name), dtype=torch.int64)
        elif name in _IDS:
            given[name] = torch.zeros(shape(_IDS, name), dtype=torch.int64)
        elif accepted[name].default is inspect.Parameter.empty and name not in _VALUES:
            given[name] = _unknown(name, sizes, dtype)
    for name in (n for n in accepted if n in _VALUES):
        described, value = _VALUES[name]
        if name in wanted or described in given:
            given[name] = torch.tensor(value(sizes))
    if "input_ids" in given and "decoder_input_ids" in given:
        given["input_ids"] = _ids(encoder_tokens(sizes.tokens))
        if "bbox" in given:
            given["bbox"] = torch.zeros(1, given["input_ids"].shape[1], 4, dtype=torch.int64)
    return given


def _unknown(name: str, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
    """A required input that no table names: its ending tells ids and masks from hidden states."""
    if name.endswith(("_ids", "_id", "mask")):
        return torch.ones(1, sizes.tokens, dtype=torch.int64)
    return torch.zeros(1, sizes.tokens, sizes.hidden, dtype=dtype, device="meta")


def _variants(
    given: dict[str, Any],
    accepted: Mapping[str, inspect.Parameter],
    config: Any,
    dtype: torch.dtype,
    is_whole: bool,
) -> Iterator[dict[str, Any]]:
    """`given` with and without token types, a mask of padding, and a cache."""
    plain = dict(given)
    if "use_cache" in accepted and is_whole:
        plain["use_cache"] = True
    if getattr(config, "add_cross_attention", False) and "encoder_hidden_states" in accepted:
        shape = (1, _ENCODER_LENGTH, config.hidden_size)
        plain.setdefault("encoder_hidden_states", torch.zeros(shape, dtype=dtype, device="meta"))
    # With token types, models show the spans of tokens that see each other in both directions.
    kinds = {
        name: _ids(given["input_ids"].shape[1])
        for name in ("token_type_ids", "mm_token_type_ids")
        if name in accepted and "input_ids" in given
    }
    masked = next((v for n, v in given.items() if n in ("input_ids", "input_features", "input_values")), None)
    whole = {}
    if masked is not None and "attention_mask" in accepted:
        whole = {"attention_mask": torch.ones(1, masked.shape[-1], dtype=torch.int64)}
    yield {**plain, **kinds}
    if whole:
        yield {**plain, **kinds, **whole}
    if kinds:
        yield plain
        yield {**plain, **whole}
    if "use_cache" in plain:
        yield {**plain, "use_cache": False}
        yield {**plain, **whole, "use_cache": False}


def _ids(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.int64)
