"""No loop runs over a user's number: each is refused with its limit before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnplug.core import Device
from attnplug.core.errors import BatchError, LayoutError, ModelConfigError, SpecError
from attnplug.registry.devices import resolve_device
from attnplug.runtime.batch.step_batch_builder import StepBatchBuilder
from attnplug.runtime.caches.block_pool import BlockPool
from attnplug.runtime.plan.budget import parse_memory

MODELS = Path(__file__).parents[2] / "examples" / "models"
HUGE = 10**12
BEYOND = 10**5000
DIGITS = "9" * 5000


@pytest.mark.parametrize("number", [2**24 + 1, HUGE, BEYOND], ids=["one", "huge", "beyond"])
def test_a_pool_of_more_blocks_than_the_host_can_count_is_refused(number):
    with pytest.raises(BatchError, match="must be at most 16777216; use larger blocks"):
        BlockPool(number)


SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128, "block_sizes": [16]}
TOO_LARGE = [
    ({"max_num_seqs": 2**31 - 1}, "max_num_seqs"),
    ({"max_num_batched_tokens": 2**31 - 1}, "max_num_batched_tokens"),
    ({"max_num_seqs": 2**16, "max_model_len": 2**31 - 1}, "block tables"),
    ({"max_num_seqs": HUGE}, "max_num_seqs"),
    (
        {"max_num_seqs": 2**16, "block_sizes": [16, 16], "cross_groups": [1], "max_encoder_len": 2**16},
        r"max_encoder_len",
    ),
]


@pytest.mark.parametrize(("changes", "named"), TOO_LARGE)
def test_a_builder_of_more_rows_than_fit_is_refused(changes, named):
    with pytest.raises(BatchError, match=named):
        StepBatchBuilder(**{**SIZES, **changes})


@pytest.mark.parametrize(
    "text",
    [BEYOND, 0, -1, f"{DIGITS}GiB", "0", "4611686018427387905", "99999999TiB"],
    ids=lambda each: "beyond" if isinstance(each, int) else each[:20],
)
def test_memory_beyond_any_machine_is_refused(text):
    with pytest.raises(LayoutError, match="must be from 1 byte to 4194304 TiB"):
        parse_memory(text)


def test_the_largest_memory_is_read():
    assert parse_memory("4194304TiB") == 2**62


@pytest.mark.parametrize(
    "text", [f"rocm:{DIGITS}.1", f"cuda:9.{DIGITS}", f"sm{DIGITS}"], ids=["rocm", "cuda", "sm"]
)
def test_a_device_of_thousands_of_digits_is_no_device(text):
    with pytest.raises(SpecError, match="is unknown"):
        Device.parse(text)


@pytest.mark.parametrize(
    "text", [f"cuda:{DIGITS}", f"rocm:{DIGITS}", "cuda:²"], ids=["cuda", "rocm", "superscript"]
)
def test_a_gpu_of_thousands_of_digits_is_no_device(text):
    with pytest.raises(SpecError, match="is unknown"):
        resolve_device(text)


LAYER = ("explain", "--device", "cpu", "--dtype", "float32")
ARGUMENTS = [
    (*LAYER, "--sliding-window", DIGITS),
    (*LAYER, "--sliding-window", HUGE),
    (*LAYER, "--window", f"{DIGITS},0"),
    (*LAYER, "--mla", f"0,512,128,64,{DIGITS}"),
    (*LAYER, "--sparse", f"token_topk:{DIGITS}"),
    (*LAYER, "--num-heads", DIGITS),
    (*LAYER, "--device", f"rocm:{DIGITS}"),
    ("doctor", "--timeout", "inf"),
    ("doctor", "--timeout", "nan"),
    ("conformance", "TORCH", "--timeout", "inf"),
    ("conformance", "TORCH", "--jobs", "1000000000"),
    ("conformance", "TORCH", "--jobs", DIGITS),
    ("conformance", "TORCH", "--shard", f"1/{DIGITS}"),
    ("conformance", "TORCH", "--memory", "0"),
    ("matrix", "--verify", "--timeout", "1e300"),
    ("matrix", "--compile-limit", DIGITS),
]


@pytest.mark.parametrize(
    "arguments", ARGUMENTS, ids=lambda each: f"{each[0]}-{each[-2]}-{str(each[-1])[:12]}"
)
def test_a_number_beyond_all_limits_is_bad_usage(run, arguments):
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert len(outcome.err) < 8000
    assert "Traceback" not in outcome.err


CONFIGS = [
    ("llama-3.1-8b", "num_hidden_layers", "must be at most 1024"),
    ("llama-3.1-8b", "num_attention_heads", "must be at most 65536"),
    ("llama-3.1-8b", "max_position_embeddings", "must be at most 16777216"),
    ("llama-3.1-8b", "num_labels", "must be at most 1048576"),
    ("whisper-large-v3", "encoder_layers", "must be at most 1024"),
    ("bloom-7b1", "n_layer", "must be at most 1024"),
    ("qwen3-30b-a3b", "num_experts", "must be at most 65536"),
]


@pytest.fixture
def changed(tmp_path):
    """A configuration of the examples with another value for one field."""

    def write(model: str, **fields: object) -> Path:
        data = json.loads((MODELS / f"{model}.json").read_text())
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**data, **fields}))
        return path

    return write


@pytest.mark.parametrize(
    "number", [10**7 * 2, HUGE, 10**4000, 1e30], ids=["large", "huge", "beyond", "float"]
)
@pytest.mark.parametrize(("model", "field", "limit"), CONFIGS)
def test_a_configuration_of_a_giant_model_is_refused_before_it_is_built(changed, model, field, limit, number):
    load_config = pytest.importorskip("attnplug.integrations.reader.config_file").load_config
    with pytest.raises(ModelConfigError, match=f"{field}=.* {limit}"):
        load_config(changed(model, **{field: number}))


def test_numbers_of_inner_configurations_and_lists_are_checked():
    check = pytest.importorskip("attnplug.integrations.reader.config_file").check_numbers
    for data in (
        {"vision_config": {"depth": 10**6}},
        {"a": [{"b": {"num_hidden_layers": 10**6}}]},
        {"depths": [2, 2, 10**6]},
    ):
        with pytest.raises(ModelConfigError, match="must be at most 1024"):
            check("config", data)
    check("config", {"num_parameters": 7 * 10**9, "vocab_size": 10**6, "max_position_embeddings": 10_485_760})


def test_a_configuration_object_is_checked_too():
    transformers = pytest.importorskip("transformers")
    read_config = pytest.importorskip("attnplug.integrations.transformers").read_config
    config = transformers.LlamaConfig(num_hidden_layers=2)
    config.num_hidden_layers = 10**6
    with pytest.raises(
        ModelConfigError, match=r"LlamaConfig: num_hidden_layers=1000000: must be at most 1024"
    ):
        read_config(config)


def test_ranks_of_thousands_of_digits_are_refused():
    read_config = pytest.importorskip("attnplug.integrations.transformers").read_config
    with pytest.raises(ModelConfigError, match=r"tensor_parallel_size=.* must be at most"):
        read_config("config.json", tensor_parallel_size=BEYOND)


@pytest.mark.slow
@pytest.mark.parametrize("size", [10**6, HUGE])
def test_sizes_that_no_machine_can_compare_are_refused(changed, size):
    read_config = pytest.importorskip("attnplug.integrations.transformers").read_config
    with pytest.raises(ModelConfigError, match="cannot be verified: a tensor of the shape"):
        read_config(changed("llama-3.1-8b", head_dim=size))


@pytest.mark.slow
def test_a_latent_of_a_giant_rank_is_refused(changed):
    read_config = pytest.importorskip("attnplug.integrations.transformers").read_config
    with pytest.raises(ModelConfigError, match="kv_lora_rank"):
        read_config(changed("deepseek-v3", kv_lora_rank=HUGE))


def test_a_model_of_too_many_modules_ends_while_it_is_built(monkeypatch):
    limits = pytest.importorskip("attnplug.integrations.reader.architecture")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(limits, "_MOST_MODULES", 10)
    with limits.modules_limited(), pytest.raises(ModelConfigError, match="more than 10 modules"):
        torch.nn.Sequential(*(torch.nn.Identity() for _ in range(11)))
    torch.nn.Sequential(*(torch.nn.Identity() for _ in range(11)))
