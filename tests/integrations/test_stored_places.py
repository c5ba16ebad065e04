"""What a checkpoint says about its cache is found in each place that quantizers write, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnplug.errors import ModelConfigError
from attnplug.integrations.reader.stored_dtype import folder_of, stored_kv_dtype
from attnplug.integrations.transformers import read_config

LLAMA = json.loads((Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b.json").read_text())
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
PROJECTIONS = {
    name: {"weight": {"dtype": "fp8_e4m3"}, "output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    for name in ("*k_proj", "*v_proj")
}


def quark(group: Any, configs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    layers = PROJECTIONS if configs is None else configs
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": group, "pack_method": "reorder"},
        "global_quant_config": {"output_tensors": None, "weight": {"dtype": "fp8_e4m3"}},
        "layer_quant_config": layers,
        **more,
    }


def outputs(dtype: Any, **more: Any) -> dict[str, Any]:
    return {name: {"output_tensors": {"dtype": dtype, **more}} for name in PROJECTIONS}


def named(data: dict[str, Any], folder: Path | None = None) -> str:
    return stored_kv_dtype({"model_type": "llama", "num_hidden_layers": 4, **data}, folder).dtype


def group(targets: list[str], **activations: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": targets, "weights": None, **activations}}}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"kv_cache_scheme": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_scheme": "fp8_e5m2"}, "fp8_e5m2"),
        ({"kv_cache_scheme": "float8_e4m3fn"}, "fp8_e4m3"),
        ({"kv_cache_scheme": "torch.float8_e5m2"}, "fp8_e5m2"),
        ({"kv_cache_scheme": "INT8"}, "int8"),
        ({"kv_cache_scheme": "NVFP4"}, "nvfp4"),
        ({"kv_cache_scheme": "static", "quant_method": "fp8"}, "fp8_e4m3"),
        ({"kv_cache_scheme": "none"}, "auto"),
        ({"kv_cache_scheme": {**FP8, "type": "int"}}, "int8"),
        ({"kv_cache_scheme": {"dtype": "float8_e4m3fn"}}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "none"}, "auto"),
        ({"kv_cache_quant_method": "FP8"}, "fp8_e4m3"),
        ({"static_kv_dtype": "float8_e4m3fn", "quant_method": "auto-round"}, "fp8_e4m3"),
        ({"static_kv_dtype": "float16", "quant_method": "auto-round"}, "float16"),
        (quark(["*k_proj", "*v_proj"]), "fp8_e4m3"),
        (quark(["*kv_proj"], {"*kv_proj": PROJECTIONS["*k_proj"]}), "fp8_e4m3"),
        (quark("*qkv_proj", {"model.layers.*.self_attn.qkv_proj": PROJECTIONS["*k_proj"]} | {"*qkv_proj": PROJECTIONS["*k_proj"]}), "fp8_e4m3"),
        (quark(["*k_proj", "*v_proj"], outputs("int8")), "int8"),
        (quark(["*k_proj", "*v_proj"], {n: {"output_tensors": [each["output_tensors"]]} for n, each in PROJECTIONS.items()}), "fp8_e4m3"),
        (quark(["*k_proj", "*v_proj"], {}, kv_cache_quant_config=PROJECTIONS), "fp8_e4m3"),
        (quark([], {}, kv_cache_quant_config=PROJECTIONS, kv_cache_post_rope=False), "fp8_e4m3"),
        (quark([], {}, kv_cache_quant_config={}, kv_cache_post_rope=False), "auto"),
        (quark([], {"*k_proj": {"output_tensors": None}}), "auto"),
        (group(["re:.*k_proj", "re:.*v_proj"], output_activations=FP8), "fp8_e4m3"),
        (group(["LlamaAttention"], input_activations=FP8), "fp8_e4m3"),
        (group(["re:.*self_attn$"], input_activations=FP8) | {"kv_cache_scheme": FP8}, "fp8_e4m3"),
        (group(["Linear"], input_activations=FP8, output_activations=None), "auto"),
        (group(["re:.*self_attn.q_proj"], input_activations={"num_bits": 4}), "auto"),
        ({"quant_method": "gptq", "bits": 4}, "auto"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["top", "text_config", "thinker"])
def test_a_section_is_read_at_any_depth(quantization: dict[str, Any], dtype: str, place: str) -> None:
    section = {"quantization_config": quantization}
    where = {"top": section, "text_config": {"text_config": section}}
    where["thinker"] = {"thinker_config": {"model_type": "x", "text_config": section}}
    assert named(where[place]) == dtype


@pytest.mark.parametrize(
    ("file", "content", "dtype"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
        ("hf_quant_config.json", {"quantization": {"kv_cache_quant_algo": None}}, "auto"),
        ("hf_quant_config.json", {"quant_method": "modelopt", "kv_cache_scheme": FP8}, "fp8_e4m3"),
        ("quantization_config.json", {"quant_method": "auto-round", "static_kv_dtype": "fp8"}, "fp8_e4m3"),
        ("quant_config.json", {"quant_method": "awq", "w_bit": 4}, "auto"),
        ("quantize_config.json", quark(["*k_proj", "*v_proj"]), "fp8_e4m3"),
        ("kv_cache_scales.json", {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn"}}, "fp8_e4m3"),
    ],
)  # fmt: skip
def test_files_beside_the_configuration_are_read(tmp_path: Path, file: str, content: Any, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / file).write_text(json.dumps(content))
    for source in (tmp_path, tmp_path / "config.json"):
        assert {spec.kv_cache_dtype for spec in read_config(source).layers.values()} == {dtype}


def test_half_the_bytes_of_a_folder_of_modelopt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    whole = read_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}})
    )
    halved = read_config(tmp_path)
    assert {spec.kv_cache_dtype for spec in whole.layers.values()} == {"auto"}
    assert {spec.kv_cache_dtype for spec in halved.layers.values()} == {"fp8_e4m3"}
    assert halved.notes == (
        "The checkpoint's KV cache is fp8_e4m3 (hf_quant_config.json: quantization.kv_cache_quant_algo).",
    )


def test_a_file_of_another_model_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    (tmp_path / "another.json").write_text(json.dumps(LLAMA))
    assert folder_of(tmp_path / "another.json") is None
    assert {spec.kv_cache_dtype for spec in read_config(tmp_path / "another.json").layers.values()} == {
        "auto"
    }
    (tmp_path / "config.json").unlink()
    assert {spec.kv_cache_dtype for spec in read_config(tmp_path / "another.json").layers.values()} == {
        "fp8_e4m3"
    }


def test_a_configuration_that_was_loaded_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2, "vocab_size": 128}))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    loaded = transformers.AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert {spec.kv_cache_dtype for spec in read_config(loaded).layers.values()} == {"fp8_e4m3"}


def test_a_nested_model_of_images_with_an_fp8_cache(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
    text |= {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    data = {"model_type": "llava", "text_config": text, "vision_config": vision, "image_token_index": 511}
    (tmp_path / "config.json").write_text(json.dumps(data))
    layers = read_config(tmp_path).layers
    assert {spec.kv_cache_dtype for name, spec in layers.items() if "language_model" in name} == {"fp8_e4m3"}
    assert {spec.kv_cache_dtype for name, spec in layers.items() if "vision" in name} <= {"auto"}
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "INT8"}}')
    with pytest.raises(ModelConfigError, match=r"itself: text_config\.quantization_config\.kv_cache_s"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"kv_cache_scheme": "FP3"}, "kv_cache_scheme='FP3': must be one of FP8, INT8, NVFP4, float16"),
        ({"kv_cache_scheme": 8}, "kv_cache_scheme=8: names no storage"),
        ({"kv_cache_scheme": {**FP8, "strategy": "attn_head"}}, "has scales by 'attn_head'"),
        ({"kv_cache_scheme": {**FP8, "type": "int", "symmetric": False}}, "has zero points"),
        ({"kv_cache_scheme": [FP8, FP8]}, "names no storage"),
        ({"kv_cache_quant_algo": "NVFP4_AFFINE"}, "kv_cache_quant_algo='NVFP4_AFFINE'"),
        ({"kv_cache_bits": 4}, "kv_cache_bits=4: is about the cache"),
        ({"kv_quant_policy": {"a": 1}}, "kv_quant_policy={'a': 1}: is about the cache"),
        ({"quant_cfg": {"*[kv]_bmm_quantizer": {"num_bits": [4, 3]}}}, "_bmm_quantizer"),
        ({"kv_cache_scheme": FP8, "static_kv_dtype": "int8"}, "contradicts itself"),
        (quark(["*k_proj"]), "names keys and not values"),
        (quark(["*v_proj"]), "names values and not keys"),
        (quark(["*k_proj", "*v_proj"], {}), "output_tensors of any of them says no dtype"),
        (quark(["*k_proj", "*v_proj"], {"*k_proj": PROJECTIONS["*k_proj"], "*v_proj": {}}), "output_tensors of *v_proj"),
        (quark(["*k_proj", "*v_proj"], outputs("fp4")), "*k_proj.output_tensors.dtype='fp4'"),
        (quark(["*k_proj", "*v_proj"], outputs("fp8_e4m3", qscheme="per_channel")), "has scales by 'per_channel'"),
        (quark(["*k_proj", "*v_proj"], outputs("fp8_e4m3") | {"*k_proj": outputs("int8")["*k_proj"]}), "several dtypes"),
        (quark(3), "must be a list of names"),
        (quark([f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "kv"]), "of 2 of 4 layers"),
        (quark(None), "no kv_cache_group says whether these are the cache"),
        (group(["re:.*k_proj"], output_activations=FP8), "names keys and not values"),
        (group(["re:.*self_attn$"], input_activations={**FP8, "num_bits": 4}), "must be 8 bits"),
    ],
)  # fmt: skip
def test_what_a_layer_cannot_have_is_refused_by_name(quantization: dict[str, Any], says: str) -> None:
    for data in (
        {"quantization_config": quantization},
        {"text_config": {"quantization_config": quantization}},
    ):
        with pytest.raises(ModelConfigError) as raised:
            named(data)
        assert says in str(raised.value)
        assert "give kv_cache_dtype (--kv-cache-dtype)" in str(raised.value)


def test_fields_of_other_caches_say_nothing() -> None:
    others = {
        "use_cache": True,
        "mamba_ssm_cache_dtype": "float32",
        "kv_lora_rank": 512,
        "share_kv_cache": True,
    }
    assert named({**others, "num_kv_shared_layers": 2, "cache_implementation": "hybrid"}) == "auto"
    assert named({"kv_cache_dtype": "fp8"}) == "fp8_e4m3"


def test_a_file_beside_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"hf_quant_config\.json: not JSON"):
        read_config(tmp_path)
    assert {spec.kv_cache_dtype for spec in read_config(tmp_path, kv_cache_dtype="fp8").layers.values()} == {
        "fp8"
    }


def of_parts(*names: str) -> dict[str, Any]:
    return group(list(names), output_activations=FP8)


def of_attention(*names: str, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    return {**group(list(names), input_activations=FP8), "ignore": list(ignore)}


@pytest.mark.parametrize(
    ("quantization", "covered"),
    [
        (of_attention("model.layers.0.self_attn"), 1),
        (of_attention("layers.0.self_attn", "layers.3.self_attn"), 2),
        (of_attention(r"re:.*layers\.[01]\.self_attn$"), 2),
        (of_attention(r"re:.*layers\.(0|1|2)\..*attn$"), 3),
        (of_attention("re:.*self_attn$", ignore=("model.layers.3.self_attn",)), 3),
        (of_parts(r"re:.*layers\.[01]\.self_attn\.k_proj", r"re:.*layers\.[01]\.self_attn\.v_proj"), 2),
        (of_parts(r"re:.*layers\.[0-2]\.self_attn\.[kv]_proj$"), 3),
        (of_parts("re:.*k_proj", r"re:.*layers\.2\..*v_proj"), 1),
        (of_parts("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"), 1),
        (quark(["*layers.1.*k_proj", "*layers.1.*v_proj"]), 1),
    ],
)
def test_the_caches_of_some_layers_are_refused(
    tmp_path: Path, quantization: dict[str, Any], covered: int
) -> None:
    data = {**LLAMA, "num_hidden_layers": 4, "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ModelConfigError, match=f"names the caches of {covered} of 4 layers"):
        read_config(tmp_path)
    with pytest.raises(ModelConfigError, match=f"names the caches of {covered} of 4 layers"):
        stored_kv_dtype(data)
    assert {
        spec.kv_cache_dtype for spec in read_config(tmp_path, kv_cache_dtype="bfloat16").layers.values()
    } == {"bfloat16"}


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (of_parts("re:.*[kv]_proj$"), "fp8_e4m3"),
        (of_parts("re:.*(k|v)_proj$"), "fp8_e4m3"),
        (of_parts(r"re:.*self_attn\.[qkv]_proj"), "fp8_e4m3"),
        (of_parts(r"re:.*layers\.\d+\.self_attn\.(?:k|v)_.*"), "fp8_e4m3"),
        (of_attention(r"re:.*layers\.\d+\.self_.*n$"), "fp8_e4m3"),
        (of_attention(*(f"model.layers.{index}.self_attn" for index in range(4))), "fp8_e4m3"),
        (of_attention("re:.*self_attn.*"), "auto"),
        (of_attention(r"re:.*\.mlp\..*"), "auto"),
        (of_parts(r"re:.*\.mlp\..*"), "auto"),
        (of_parts("re:.*q_proj$"), "auto"),
    ],
)
def test_the_cache_is_found_by_the_names_of_the_modules(
    tmp_path: Path, quantization: dict[str, Any], dtype: str
) -> None:
    data = {**LLAMA, "num_hidden_layers": 4, "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert {spec.kv_cache_dtype for spec in read_config(tmp_path).layers.values()} == {dtype}


def test_groups_may_name_the_layers_together_by_names_of_the_class(tmp_path: Path) -> None:
    halves = {
        f"group_{half}": {"targets": [rf"re:.*h\.[{half}]\.attn$"], "input_activations": FP8}
        for half in ("01", "23")
    }
    data: dict[str, Any] = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 128}
    data["quantization_config"] = {"config_groups": halves}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert {spec.kv_cache_dtype for spec in read_config(tmp_path).layers.values()} == {"fp8_e4m3"}
    del halves["group_23"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ModelConfigError, match="names the caches of 2 of 4 layers"):
        read_config(tmp_path)


def test_a_target_that_is_no_regular_expression_is_named() -> None:
    with pytest.raises(ModelConfigError, match="is no regular expression"):
        named({"quantization_config": of_parts("re:*(k_proj")})
