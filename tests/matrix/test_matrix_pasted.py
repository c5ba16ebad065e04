"""A config.json pasted into the page: the answer is the selector's, or a refusal that says why and names the command."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from attnplug.cli import main
from attnplug.integrations.known.reading import FAMILIES, read_known
from attnplug.integrations.model_spec import Client
from attnplug.matrix import Matrix, pasted
from attnplug.matrix.model_page import ExampleModel, example_models, model_data
from attnplug.matrix.which_backend import answers_for
from attnplug.registry import Registry
from attnplug.registry.devices import resolve_device

EXAMPLES = {path.stem: path for path in (Path(__file__).parents[2] / "examples" / "models").glob("*.json")}
# Layers with a state have answers only on the page's list of models.
STATES = sorted(
    model.name for model in example_models() if any(spec.state is not None for spec in model.layers.values())
)
GPUS = ("a100", "h100", "b200", "l4", "mi300x", "cpu")

LLAMA = {"num_hidden_layers": 28, "num_attention_heads": 24, "hidden_size": 3072, "num_key_value_heads": 8}
QWEN = {"num_hidden_layers": 28, "num_attention_heads": 28, "hidden_size": 3584, "num_key_value_heads": 4}
SLIDING = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 21}
GEMMA = {"num_hidden_layers": 26, "num_attention_heads": 4, "hidden_size": 1152, "num_key_value_heads": 1}
DEEPSEEK = {
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "hidden_size": 2048,
    "num_key_value_heads": 16,
}
WHISPER = {"d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12, "decoder_layers": 4}
MADE: dict[str, dict[str, Any]] = {
    "llama-3.2-3b": {"model_type": "llama", **LLAMA, "head_dim": 128, "torch_dtype": "float16"},
    "tinyllama": {"model_type": "llama", **LLAMA, "hidden_size": 1536, "num_key_value_heads": 4},
    "one KV head": {"model_type": "llama", **LLAMA, "hidden_size": 1920, "num_key_value_heads": 1},
    "mistral with a narrow window": {"model_type": "mistral", **LLAMA, "sliding_window": 128},
    "mistral with a window": {"model_type": "mistral", **LLAMA, "sliding_window": 1000},
    "qwen2": {"model_type": "qwen2", **QWEN, "rope_theta": 1000000.0},
    "qwen2 with late windows": {"model_type": "qwen2", **QWEN, **SLIDING},
    "mixtral": {"model_type": "mixtral", **LLAMA},
    "gemma3-1b": {"model_type": "gemma3_text", **GEMMA, "sliding_window": 512},
    "gemma2": {"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": 30.0, "head_dim": 128},
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        **LLAMA,
        "num_attention_heads": 64,
        "hidden_size": 2880 + 64 * 3,
    },
    "granite": {"model_type": "granite", **LLAMA, "attention_multiplier": 0.0078125},
    "deepseek-v2": {"model_type": "deepseek_v2", **DEEPSEEK, "kv_lora_rank": 512, "q_lora_rank": None},
    "deepseek-v3.2": {"model_type": "deepseek_v32", **DEEPSEEK, "num_attention_heads": 128}
    | {"num_key_value_heads": 128},
    "bert-large": {
        "model_type": "bert",
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_size": 1024,
    },
    "bloom-560m": {"model_type": "bloom", "n_layer": 24, "n_head": 16, "hidden_size": 1024},
    "whisper-small": {
        "model_type": "whisper",
        **WHISPER,
        "decoder_attention_heads": 12,
        "torch_dtype": "float32",
    },
}
"""Configurations of models that are no examples; the page has answers for all."""

ANSWER = """
([text, gpu]) => {
  const device = models.devices.indexOf(models.gpus.find((each) => each.key === gpu).device);
  return models.dtypes.map((_, dtype) => {
    asked.dtype = dtype;
    const { text: { sentence, served, bytes, kinds, notes, dtype: stored }, layers } = pastedAnswer(text, device);
    const tables = kinds.map((kind) => kind.tables.map((each) => ({
      ...models.tables[each],
      rows: models.tables[each].rows.map(([name, verdict, why]) => [name, verdict, why.map((one) => models.reasons[one])]),
    })));
    return { sentence, served, bytes, kinds, notes, stored, layers, tables };
  });
}
"""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


@pytest.fixture(scope="session")
def data() -> Any:
    return model_data(Registry(), with_pasted=True)


@pytest.fixture
def page(open_page: Any, data: Any) -> Any:
    return open_page(Matrix(()), "#model=config.json", models=data)


@pytest.fixture(scope="module")
def asked_page(open_page_once: Any, data: Any) -> Any:
    return open_page_once(Matrix(()), "#model=config.json", models=data)


def expected(registry: Registry, config: dict[str, Any], gpu: str) -> list[dict[str, Any]]:
    """What the selector says of a configuration, as the page shows it."""
    read = read_known(config, 1, "auto", Client.ENGINE)
    assert read is not None
    model = ExampleModel("your model", "", read.layers)
    found = []
    for answer in answers_for(registry, model, resolve_device(gpu)).values():
        outcome = answer.outcome
        kinds, tables = [], []
        for kind in outcome.kinds:
            decisions = kind.alone or (kind.joint,)
            kinds.append(
                [kind.words, list(kind.joint.members.values()) if kind.joint else [], kind.reference]
            )
            tables.append(
                [
                    {
                        "phase": str(each.phase or ""),
                        "rows": [
                            [
                                one.name,
                                "chosen" if one is each.chosen else "accepted" if one.accepted else "refused",
                                [str(reason) for reason in one.reasons],
                            ]
                            for one in each.candidates
                        ],
                    }
                    for each in decisions
                ]
            )
        specs = list(dict.fromkeys(read.layers.values()))
        found.append(
            {"sentence": answer.sentence, "served": outcome.is_served, "bytes": outcome.bytes_per_token}
            | {
                "notes": list(outcome.notes),
                "stored": outcome.kv_cache_dtype,
                "tables": tables,
                "kinds": kinds,
            }
            | {"layers": [specs.index(spec) for spec in read.layers.values()]}
        )
    return found


@pytest.mark.parametrize("name", [*sorted(EXAMPLES.keys() - STATES), *MADE])
def test_the_answer_is_the_selectors(asked_page: Any, registry: Registry, name: str) -> None:
    text = EXAMPLES[name].read_text(encoding="utf-8") if name in EXAMPLES else json.dumps(MADE[name])
    for gpu in GPUS:
        shown = asked_page.tab.evaluate(ANSWER, [text, gpu])
        for each in shown:
            each["kinds"] = [[kind["words"], kind["backends"], kind["reference"]] for kind in each["kinds"]]
        assert shown == expected(registry, json.loads(text), gpu)


@pytest.mark.parametrize("name", ["gemma3-1b", "deepseek-v2", "whisper-small"])
def test_the_command_of_an_answer_gives_the_answer(
    page: Any, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(MADE[name])
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    page.tab.get_by_role("combobox", name="GPU").select_option("A100 (sm80)")
    page.tab.get_by_role("combobox", name="KV cache dtype").select_option("fp8_e5m2")
    page.tab.get_by_label("config.json of your model").fill(text)
    program, *arguments = page.tab.locator("#command").inner_text().split()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "argv", [program, *arguments, "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code in (0, None)
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    shown = page.tab.evaluate(
        "text => { const { text: { kinds }, layers } = pastedAnswer(text, models.devices.indexOf('sm80'));"
        "return layers.map((kind) => [...new Set(kinds[kind].backends)].join('+')); }",
        text,
    )
    assert [decision["backend"] for decision in decisions] == shown


def test_every_question_of_the_grid_has_one_answer_over_its_ranges(data: Any) -> None:
    assert [key for key, *_ in pasted._questions() if key not in data["pasted"]["keys"]] == []


def test_values_inside_of_the_ranges_have_the_answers_of_the_ends(page: Any, registry: Registry) -> None:
    dice = random.Random(0)
    for _ in range(24):
        kv_heads = dice.choice([1, 2, 3, 5, 8, 12])
        heads = kv_heads * dice.choice([1, 2, 3, 6, 7, 16, 71])
        config = {"model_type": "mistral", "num_hidden_layers": dice.randrange(1, 90), "hidden_size": heads}
        config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        config |= {"head_dim": dice.choice([64, 96, 128]), "dtype": dice.choice(["bfloat16", "float16"])}
        config["sliding_window"] = dice.choice([None, 2, 77, 127, 128, 129, 130, 1024, 9999, 1 << 20])
        gpu = dice.choice(data_gpus(page))
        shown = page.tab.evaluate(ANSWER, [json.dumps(config), gpu])
        for each in shown:
            each["kinds"] = [[kind["words"], kind["backends"], kind["reference"]] for kind in each["kinds"]]
        assert shown == expected(registry, config, gpu), config


def data_gpus(page: Any) -> list[str]:
    found: list[str] = page.tab.evaluate("models.gpus.map((each) => each.key)")
    return found


READ = """
(texts) => texts.map((text) => {
  try {
    const { dtype, heads, kvHeads, size, scale, layers } = layersOf(text, pasted.rules);
    return [dtype, heads, kvHeads, String(size), scale, layers];
  } catch (problem) {
    if (!(problem instanceof Refusal)) throw problem;
    return null;
  }
})
"""
VALUES = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    8,
    64,
    128,
    4096,
    0.0,
    0.1,
    0.5,
    1.0,
    30.0,
    1e6,
    "silu",
    "gelu",
    "x",
    [],
    [1],
    {},
]
VALUES += [
    {"type": "linear", "factor": 8.0},
    {"rope_type": "yarn", "factor": 40, "mscale_all_dim": 0.7},
    "bfloat16",
]
VALUES += [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "llama3", "factor": 8.0},
    {"quant_method": "fp8"},
]


def test_the_page_reads_what_the_rules_read_and_nothing_else(page: Any) -> None:
    dice = random.Random(0)
    bases = [json.loads(path.read_text(encoding="utf-8")) for path in EXAMPLES.values()] + list(MADE.values())
    configs = []
    for _ in range(3000):
        config = dict(dice.choice(bases))
        fields = [*FAMILIES.get(config["model_type"], FAMILIES["deepseek_v3"]).fields, "unheard"]
        for name in dice.sample(fields, dice.randrange(4)):
            config[name] = dice.choice(VALUES)
        if dice.random() < 0.2:
            del config[dice.choice(list(config))]
        configs.append(config)
    read = [read_known(config, 1, "auto", Client.ENGINE) for config in configs]
    assert sum(each is not None for each in read) > 500
    for config, shown, model in zip(
        configs, page.tab.evaluate(READ, list(map(json.dumps, configs))), read, strict=True
    ):
        assert (shown is None) == (model is None), config
        if model is None:
            continue
        # The last layer: the encoder of Whisper comes first, and may have other heads.
        spec = list(model.layers.values())[-1]
        size: Any = spec.head_size
        if spec.mla is not None:
            size = f"{spec.num_heads}/{spec.mla.kv_lora_rank}/{spec.mla.qk_rope_head_dim}/{spec.mla.qk_nope_head_dim}/{spec.mla.v_head_dim}"
        *sizes, scale, layers = shown
        assert sizes[:3] == [spec.dtype, spec.num_heads, spec.num_kv_heads]
        assert sizes[3].split("/")[-1 if spec.mla is None else slice(None)] == (
            str(size) if spec.mla is None else size.split("/")
        )
        assert scale == pytest.approx(spec.scale, rel=1e-12)
        names = {"encoder": str(spec.attn_type) if spec.attn_type == "encoder_only" else "encoder"}
        assert layers == [names.get(each.kinds[0], each.kinds[0]) for each in model.layers.values()]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "this is not JSON"),
        ("[]", "a config.json is a JSON object"),
        ("{}", "model_type is missing"),
        ({"model_type": "mamba2"}, 'model_type "mamba2" is none of those that this page reads'),
        ({"model_type": "constructor"}, 'model_type "constructor" is none of those'),
        ({"model_type": "llama", **LLAMA, "attn_window": 3}, "do not know the field attn_window"),
        ({"model_type": "llama", **LLAMA, "hidden_act": "mish"}, 'do not know hidden_act="mish"'),
        ({"model_type": "llama", "hidden_size": 64}, "the field num_hidden_layers is missing"),
        (
            {"model_type": "llama", **LLAMA, "hidden_size": 3000, "num_attention_heads": 7},
            "these values together",
        ),
        (
            {"model_type": "llama", **LLAMA, "head_dim": 72},
            "no answers for layers like these: bfloat16 72 full",
        ),
        (
            {
                "model_type": "llama",
                **LLAMA,
                "quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"a": 1}},
            },
            "do not know quantization_config",
        ),
        (
            {"model_type": "granite", **LLAMA, "attention_multiplier": 0.0001},
            "its answers are for a scale from 0.001953125 to 0.9, and this is 0.0001",
        ),
    ],
)
def test_what_the_page_does_not_know_is_refused_with_the_command(page: Any, config: Any, reason: str) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    page.tab.get_by_role("combobox", name="GPU").select_option("A100 (sm80)")
    page.tab.get_by_label("config.json of your model").fill(text)
    sentence = page.tab.locator("#sentence").inner_text()
    assert sentence.startswith("This page cannot answer for this file: ")
    assert reason in sentence
    assert page.tab.locator("#command").inner_text().startswith("attnplug select config.json --device a100")
    assert page.tab.get_by_role("img").count() == 0


@pytest.mark.parametrize("name", STATES)
def test_models_with_states_are_refused_by_their_type(page: Any, name: str) -> None:
    text = EXAMPLES[name].read_text(encoding="utf-8")
    page.tab.get_by_label("config.json of your model").fill(text)
    reason = f'model_type "{json.loads(text)["model_type"]}" is none of those that this page reads'
    assert reason in page.tab.locator("#sentence").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_keyboard_pastes_a_configuration_on_any_screen(
    open_page: Any, data: Any, width: int, scheme: str
) -> None:
    page = open_page(Matrix(()), models=data, viewport={"width": width, "height": 844}, color_scheme=scheme)
    box = page.tab.get_by_role("combobox", name="Model")
    box.focus()
    page.tab.keyboard.type("my own")
    assert page.hash == "#model=config.json&gpu=h100&kv=auto"
    assert page.tab.locator("#sentence").inner_text() == "Paste the config.json of your model above."
    for _ in range(3):
        page.tab.keyboard.press("Tab")
    page.tab.keyboard.insert_text(json.dumps(MADE["gemma3-1b"], indent=2))
    assert re.fullmatch(
        r"On an H100 with a bfloat16 cache, your model runs on [A-Z].*\.",
        page.tab.locator("#sentence").inner_text(),
    )
    assert page.tab.locator("#strip .layer").count() in (26, 52)
    assert "22 layers, sliding 512" in page.tab.locator("#strip-legend").inner_text()
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert "gemma" not in page.hash


def test_a_page_without_the_answers_has_no_place_to_paste(open_page: Any, data: Any) -> None:
    page = open_page(Matrix(()), "#model=config.json", models={**data, "pasted": None})
    assert page.tab.get_by_role("option", name="my own config.json").count() == 0
    assert (
        page.tab.locator("#sentence").inner_text().startswith("On an H100 with a bfloat16 cache, gpt-oss-20b")
    )
