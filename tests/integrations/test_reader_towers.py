"""Vision, audio and multimodal families: their default configurations, with the layers that they give."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
import transformers

from attnplug.core.spec import LayerSpec
from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config

# Some modelling files use what torch deprecates when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore")


def encoder(heads, size, **more):
    fields = {"attn_type": "encoder_only", "direct_kv": True, **more}
    return LayerSpec(num_heads=heads, num_kv_heads=heads, head_size=size, **fields)


def decoder(heads, kv_heads, size, **more):
    return LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=size, **more)


def cross(heads, size, **more):
    return encoder(heads, size, attn_type="encoder_decoder", **more)


def text_tower(heads, size):
    """Causal self-attention of a text encoder, which keeps no cache."""
    return decoder(heads, heads, size, direct_kv=True)


EXPECTED = {
    # Images.
    "vit": {encoder(12, 64): 12},
    "deit": {encoder(12, 64): 12},
    "dinov2": {encoder(12, 64): 12},
    "dinov2_with_registers": {encoder(12, 64): 12},
    "dinov3_vit": {encoder(6, 64): 12},
    "ijepa": {encoder(12, 64): 12},
    "yolos": {encoder(12, 64): 12},
    "dpt": {encoder(12, 64): 12},
    "clip_vision_model": {encoder(12, 64): 12},
    "siglip_vision_model": {encoder(12, 64): 12, cross(12, 64): 1},
    "vit_mae": {encoder(12, 64): 12},
    "vit_msn": {encoder(12, 64): 12},
    "qwen2_vl_vision": {encoder(16, 80): 32},
    "qwen2_5_vl_vision": {encoder(16, 224): 32},
    "qwen3_vl_vision": {encoder(16, 72): 27},
    "glm4v_vision": {encoder(12, 128): 24},
    # Video.
    "videomae": {encoder(12, 64): 12},
    "vivit": {encoder(12, 64): 12},
    # Audio.
    "audio-spectrogram-transformer": {encoder(12, 64): 12},
    "hubert": {encoder(12, 64): 12},
    "wav2vec2": {encoder(12, 64): 12},
    "unispeech-sat": {encoder(12, 64): 12},
    "data2vec-audio": {encoder(12, 64): 12},
    "qwen2_audio_encoder": {encoder(20, 64): 32},
    "voxtral_encoder": {encoder(20, 64): 32},
    "speech_to_text": {encoder(4, 64, attn_type="encoder"): 12, decoder(4, 4, 64): 6, cross(4, 64, direct_kv=False): 6},
    "moonshine": {encoder(8, 36, attn_type="encoder"): 6, decoder(8, 8, 36): 6, cross(8, 36, direct_kv=False): 6},
    # Text with images or audio.
    "clip": {encoder(12, 64): 12, text_tower(8, 64): 12},
    "siglip": {encoder(12, 64): 24, cross(12, 64): 1},
    "clip_text_model": {text_tower(8, 64): 12},
    "llava": {decoder(32, 32, 128): 32, encoder(16, 64): 24},
    "internvl": {decoder(32, 32, 128): 32, encoder(16, 64): 24},
    "qwen2_vl": {decoder(64, 8, 128): 80, encoder(16, 80): 32},
    "audioflamingo3": {decoder(32, 32, 128): 32, encoder(20, 64): 32},
    "idefics2_vision": {encoder(12, 64): 12},
}  # fmt: skip


# One of each four runs in a plain run; all of them run as slow tests.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.rare] if i % 4 else ())
        for i, name in enumerate(EXPECTED)
    ],
)
def test_every_layer_of_the_default_configuration_is_read(name):
    model = read_config(transformers.CONFIG_MAPPING[name]())

    assert Counter(model.layers.values()) == EXPECTED[name]


def test_a_tower_with_attention_of_its_own_is_named_with_the_reason():
    model = read_config(transformers.CONFIG_MAPPING["got_ocr2"]())

    assert Counter(model.layers.values()) == {decoder(16, 16, 64): 24}
    (reason,) = model.other_layers.values()
    assert reason.startswith(
        "vision encoder, not read: model.vision_tower.layers.0.attn: GotOcr2VisionAttention"
    )


def test_layers_of_a_tower_are_named_by_their_path_in_the_model():
    names = list(read_config(transformers.CONFIG_MAPPING["llava"]()).layers)

    assert names[0] == "model.language_model.layers.0.self_attn"
    assert names[32] == "model.vision_tower.encoder.layers.0.self_attn"


def test_heads_of_towers_are_divided_among_ranks_too(small):
    config = small("CLIPVision", image_size=28, patch_size=14)

    assert set(read_config(config, tensor_parallel_size=2).layers.values()) == {encoder(2, 16)}


def test_a_mask_in_torchs_own_module_is_refused(monkeypatch):
    torch = pytest.importorskip("torch")
    forward = torch.nn.MultiheadAttention.forward

    def masked(self, query, key, value, **options):
        mask = torch.zeros(query.shape[1], key.shape[1], dtype=query.dtype)
        return forward(self, query, key, value, **options, attn_mask=mask)

    monkeypatch.setattr(torch.nn.MultiheadAttention, "forward", masked)

    with pytest.raises(ModelConfigError, match="MultiheadAttention computes attention of its own"):
        read_config(transformers.CONFIG_MAPPING["siglip_vision_model"]())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("switch_transformers", "relative position bias"),
        ("pix2struct", "relative position bias"),
        ("wav2vec2-bert", "relative position bias"),
        ("swin", "adds a bias of its own"),
        ("deberta", "DisentangledSelfAttention computes attention of its own"),
        (
            "canine",
            "CanineSelfAttention computes attention of its own.*: it adds a mask or a bias of its own",
        ),
        ("convnext", "ConvNextModel has no attention layer"),
        ("sam3_geometry_encoder", "has no model class for sam3_geometry_encoder; read the configuration of"),
        ("bark", "BarkModel has no forward to run; read the configurations inside it"),
        ("sam2_video", "needs the input inference_session, a Sam2VideoInferenceSession"),
        ("dots1", "cannot build Dots1ForCausalLM"),
    ],
)
def test_a_refusal_has_the_cause_in_the_model(name, reason):
    with pytest.raises(ModelConfigError, match=reason):
        read_config(transformers.CONFIG_MAPPING[name]())


def test_a_missing_package_is_named():
    if importlib.util.find_spec("timm"):
        pytest.skip("timm is installed")

    with pytest.raises(ModelConfigError, match=r"DetrModel needs a package that is not installed: .* timm"):
        read_config(transformers.CONFIG_MAPPING["detr"]())
