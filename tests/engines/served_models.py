"""A small model served by vLLM's whole engine on a CPU, and the same weights without vLLM; run by test_vllm_engine.py.

python served_models.py MODEL BACKEND prints one line of JSON: the tokens of both, and the backends that were chosen. With
LOOKUP as third word the weights are those of lookup.py, and what they say takes the place of the model without vLLM.
Prompts share steps, are cut by the token budget, and outgrow windows and chunks. All is float32, so no tokens tie.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import vllm_on_cpu
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "engines"))
import lookup  # noqa: E402
import model_folder  # noqa: E402
import random_weights  # noqa: E402
import sparse_model  # noqa: E402
import vllm_model  # noqa: E402

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}
WINDOW = {"sliding_window": 24, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
CHUNK = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "attention_chunk_size": 32,
    "interleave_moe_layer_step": 0,
    "moe_layers": [],
    "no_rope_layers": [1, 1, 0, 1, 1, 0],
    "attn_temperature_tuning": False,
    "intermediate_size_mlp": 256,
    "rope_theta": 10_000.0,
}
MODELS = {
    "qwen3": ("qwen3-8b", {}),
    "gemma3": ("gemma-3-27b-text", WINDOW),
    "llama4": ("llama-3.1-8b", CHUNK),
    "deepseek": ("deepseek-v3.2", sparse_model.CONFIG),
}
PROMPTS = [[(i * 7 + j * 13) % 500 + 3 for j in range(n)] for i, n in enumerate((100, 5, 70, 33))]
COUNT = 12


def main() -> None:
    model, backend, *more = sys.argv[1:]
    vllm_on_cpu.prepare()
    from attnplug.integrations.vllm import decisions, register

    register()
    weights = lookup if more else random_weights
    vllm_model.register_weights(weights.LOAD_FORMAT, weights.fill)
    import vllm

    if model == "deepseek":
        vllm_on_cpu.prepare_latents()
        sparse_model.stand_in_for_the_indexer()
    base, changes = MODELS[model]
    config = json.loads((ROOT / "examples" / "models" / f"{base}.json").read_text()) | SMALL | changes
    file = Path(tempfile.mkdtemp()) / "config.json"
    file.write_text(json.dumps(config))
    folder = model_folder.folder(str(file), SMALL["num_hidden_layers"])
    llm = vllm.LLM(
        model=folder,
        load_format=weights.LOAD_FORMAT,
        skip_tokenizer_init=True,
        dtype="bfloat16" if more else "float32",
        attention_backend=backend,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        # Where there is an indexer, the backend's own preference has to be a size that it reads.
        block_size=None if model == "deepseek" else 16,
        enforce_eager=True,
        gpu_memory_utilization=0.1,
        seed=0,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    plan, draw = lookup.Plan.of(llm.llm_engine.vllm_config.model_config.hf_text_config), random.Random(0)
    given = [plan.prompt(length, draw) for length in (100, 40, 170, 33)] if more else PROMPTS
    prompts = [{"prompt_token_ids": prompt} for prompt in given]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    # The second time, prompts come from the prefix cache.
    again = llm.generate(prompts, sampling, use_tqdm=False)
    if more:
        right = [plan.follow(prompt, COUNT) for prompt in given]
    else:
        [loaded] = llm.apply_model(_weights)
        config = json.loads((Path(folder) / "config.json").read_text())
        if model == "deepseek":
            plain: Any = sparse_model.Sparse(loaded, config, COUNT)
        else:
            plain = Llama4(loaded, config) if model == "llama4" else Plain(loaded, folder)
        right = [plain.draw(prompt) for prompt in given]
    result = {
        "served": [list(output.outputs[0].token_ids) for output in outputs],
        "again": [list(output.outputs[0].token_ids) for output in again],
        "right": right,
        "chosen": {name: str(found.backend) for name, found in decisions(llm.llm_engine.vllm_config).items()},
    }
    print("served_models: " + json.dumps(result))


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return model.state_dict()


class Plain:
    """The model in transformers, with eager attention."""

    def __init__(self, weights: Mapping[str, torch.Tensor], folder: str) -> None:
        config = AutoConfig.from_pretrained(folder)
        heads, keys = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        split: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            if "qkv_proj" in name:
                parts = dict(zip("qkv", weight.split([heads, keys, keys]), strict=True))
                split |= {name.replace("qkv_proj", f"{part}_proj"): each for part, each in parts.items()}
            elif "gate_up_proj" in name:
                gate, up = weight.chunk(2)
                split |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
            else:
                split[name] = weight
        missing = self.model.load_state_dict(split, strict=False).missing_keys
        assert not missing, missing

    def draw(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        made = self.model.generate(ids, max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
        return made[0, len(prompt) :].tolist()


class Llama4:
    """Llama 4 without experts, with vLLM's rotary order: chunks, and layers that see all."""

    def __init__(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        self.weights, self.config = {name: weight.double() for name, weight in weights.items()}, config

    def draw(self, prompt: list[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(COUNT):
            ids.append(int(self.logits(ids).argmax()))
        return ids[len(prompt) :]

    def logits(self, ids: list[int]) -> torch.Tensor:
        weights, config = self.weights, self.config
        size, chunk, place = config["head_dim"], config["attention_chunk_size"], torch.arange(len(ids))
        row = weights["model.embed_tokens.weight"][torch.tensor(ids)]
        angle = place[:, None] * config["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        for index in range(config["num_hidden_layers"]):
            own = f"model.layers.{index}."
            normed = self.norm(row, weights[own + "input_layernorm.weight"])
            states = (normed @ weights[own + "self_attn.qkv_proj.weight"].T).unflatten(-1, (-1, size))
            query, key, value = states.split([4, 2, 2], dim=1)
            seen = place[:, None] >= place
            if config["no_rope_layers"][index]:
                query, key = (self.norm(self.rotate(each, turn)) for each in (query, key))
                seen &= place[:, None] // chunk == place // chunk
            key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
            scores = torch.einsum("qhd,khd->hqk", query, key) * size**-0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -1e30).softmax(-1), value)
            row = row + mixed.flatten(1) @ weights[own + "self_attn.o_proj.weight"].T
            normed = self.norm(row, weights[own + "post_attention_layernorm.weight"])
            gate, up = (normed @ weights[own + "feed_forward.gate_up_proj.weight"].T).chunk(2, dim=-1)
            row = (
                row + (torch.nn.functional.silu(gate) * up) @ weights[own + "feed_forward.down_proj.weight"].T
            )
        return self.norm(row[-1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T

    def norm(self, given: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
        return given * (given.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * weight

    @staticmethod
    def rotate(given: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(*given.chunk(2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)


if __name__ == "__main__":
    main()
