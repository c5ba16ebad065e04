"""The scale of a layer is measured: numbers on queries and on keys, twice, by layer, in any form."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from attnplug.errors import ModelConfigError
from attnplug.integrations.reader import number_checks
from attnplug.integrations.transformers import read_config

ROOT = 16**-0.5
"""The scale of a head of 16, which the classes below pass with the call."""


def with_lines(cls: Any, lines: str, before: str = "    cos, sin = position") -> Callable[..., Any]:
    """The forward of an attention class with more lines, in the namespace of its module."""
    source = textwrap.dedent(inspect.getsource(cls.forward))
    assert source.count(before) == 1
    source = source.replace(before, textwrap.indent(lines, "    ") + "\n" + before)
    namespace = vars(inspect.getmodule(cls))
    found: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{source}", namespace, found)
    forward: Callable[..., Any] = found["forward"]
    return forward


@pytest.fixture
def scales(monkeypatch: pytest.MonkeyPatch, small: Any) -> Callable[..., list[float]]:
    """The scales of a small Llama whose attention has more lines, by layer."""

    def read(lines: str, before: str = "    cos, sin = position", **asked: Any) -> list[float]:
        forward = with_lines(modeling_llama.LlamaAttention, lines, before)
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
        return [spec.scale for spec in read_config(small("Llama"), **asked).layers.values()]

    return read


AFTER_ROPE = "    if past_key_values is not None:"


@pytest.mark.parametrize("before", ["    cos, sin = position", AFTER_ROPE])
@pytest.mark.parametrize(
    ("lines", "factor"),
    [
        ("query_states = query_states * 0.5", 0.5),
        ("key_states = key_states * 0.5", 0.5),
        ("query_states = query_states * 0.5\nkey_states = key_states * 0.5", 0.25),
        ("query_states = query_states * 0.5\nquery_states = query_states * 0.5", 0.25),
        ("query_states = query_states / 3\nkey_states = 5 * key_states", 5 / 3),
        ("query_states = query_states.mul(0.5).div(4.0)", 0.125),
        ("query_states = torch.mul(query_states, 0.5)", 0.5),
        ("query_states *= 0.5", 0.5),
        ("query_states /= self.head_dim**0.5", 0.25),
        ("query_states = query_states * torch.tensor(0.5)", 0.5),
        ("query_states = query_states / torch.sqrt(torch.tensor(9.0))", 1 / 3),
        ("query_states = query_states * self.head_dim**-0.25\nkey_states = key_states * self.head_dim**-0.25", ROOT),
        ("query_states = query_states * -2.0\nkey_states = key_states * -0.25", 0.5),
        ("value_states = value_states * 2.0", 1.0),
        ("unused = query_states * 7.0", 1.0),
        ("query_states = (query_states * 4.0) * 0.25", 1.0),
        ("query_states = torch.nn.functional.rms_norm(query_states * 8.0, (self.head_dim,), eps=1e-9)", 1.0),
        ("query_states = query_states * torch.ones(self.head_dim).to(query_states)", 1.0),
    ],
)  # fmt: skip
def test_numbers_on_queries_and_keys_are_part_of_the_scale(
    scales: Any, lines: str, factor: float, before: str
) -> None:
    found = scales(lines, before)
    assert len(found) == 4
    assert found == pytest.approx([ROOT * factor] * 4, rel=1e-9)


@pytest.mark.parametrize(
    ("lines", "factors"),
    [
        ("query_states = query_states / (self.layer_idx + 1)", [1, 1 / 2, 1 / 3, 1 / 4]),
        ("if self.layer_idx % 2:\n    key_states = key_states * 0.5", [1, 0.5, 1, 0.5]),
        ("for _ in range(self.layer_idx):\n    query_states = query_states * 0.5", [1, 0.5, 0.25, 0.125]),
        ("query_states = query_states * [0.5, 0.5, 2.0, 2.0][self.layer_idx]", [0.5, 0.5, 2.0, 2.0]),
    ],
)
def test_each_layer_has_its_own_scale(scales: Any, lines: str, factors: list[float]) -> None:
    assert scales(lines) == pytest.approx([ROOT * factor for factor in factors], rel=1e-9)


def test_transformers_itself_passes_the_scale_of_the_call(scales: Any) -> None:
    assert scales("query_states = query_states * 0.5", client="transformers") == [ROOT] * 4


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            "query_states = torch.cat([query_states[..., :8] * 0.5, query_states[..., 8:]], -1)",
            "it multiplies parts of its queries by different numbers",
        ),
        ("query_states = query_states / 0.0", "it multiplies its queries"),
        ("key_states = key_states * 0.5 + key_states", "it adds products to its keys"),
        ("key_states = key_states * 0.5 + value_states", "it multiplies parts of its keys"),
        (
            "query_states = query_states * torch.empty((), device='meta')",
            "it multiplies its queries by a tensor whose value is not known",
        ),
    ],
)
def test_what_one_scale_cannot_say_is_refused(scales: Any, lines: str, says: str) -> None:
    with pytest.raises(ModelConfigError) as raised:
        scales(lines)
    assert "model.layers.0.self_attn: LlamaAttention multiplies tensors by numbers" in str(raised.value)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("lines", "factor"),
    [
        ("query_states = query_states * 0.5", 0.5),
        # The epsilon of the norm sees the number.
        ("query_states = self.q_norm(query_states * 0.5)", 1.0),
        ("query_states = self.q_norm(query_states) * 0.5\nkey_states = self.k_norm(key_states * 9.0)", 0.5),
    ],
)
def test_numbers_before_a_norm_do_not_count(
    monkeypatch: pytest.MonkeyPatch, small: Any, lines: str, factor: float
) -> None:
    forward = with_lines(modeling_qwen3.Qwen3Attention, lines)
    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", forward)
    scales = [spec.scale for spec in read_config(small("Qwen3")).layers.values()]
    assert scales == pytest.approx([ROOT * factor] * 4, rel=1e-4)


def test_attention_of_the_file_that_differs_by_layer_is_compared_for_each(
    monkeypatch: pytest.MonkeyPatch, small: Any
) -> None:
    source = inspect.getsource(modeling_llama.eager_attention_forward)
    changed = source.replace("* scaling", "* scaling / (module.layer_idx + 1)")
    assert changed != source
    exec(f"from __future__ import annotations\n{changed}", vars(modeling_llama), own := {})
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", own["eager_attention_forward"])
    with pytest.raises(ModelConfigError, match=r"layers\.1\.self_attn: LlamaAttention cannot be verified"):
        read_config(small("Llama"))


PRIVACY = {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("family", "fields", "scale"),
    [
        ("OpenAIPrivacyFilter", {**PRIVACY, "head_dim": 64, "num_local_experts": 2, "num_experts_per_tok": 1}, 0.125),
        ("OpenAIPrivacyFilter", {**PRIVACY, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}, 0.25),
        ("Whisper", {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1}, 0.25),
        ("Granite", {"attention_multiplier": 0.05}, 0.05),
    ],
)  # fmt: skip
def test_families_that_multiply_their_queries_or_keys(
    small: Any, family: str, fields: dict[str, Any], scale: float
) -> None:
    if family == "Whisper":
        fields |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_hidden_layers": 1}
    found = {spec.scale for spec in read_config(small(family, **fields)).layers.values()}
    assert found == {scale}


@pytest.mark.parametrize("multiplier", [0.01, 1.0, 0.5])
def test_keys_of_falcon_h1_are_multiplied(small: Any, multiplier: float) -> None:
    fields = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8}
    config = small("FalconH1", key_multiplier=multiplier, **fields)
    found = [spec.scale for spec in read_config(config).layers.values() if spec.state is None]
    assert found == pytest.approx([ROOT * multiplier] * 4, rel=1e-9)


def test_the_inverse_index_of_a_layer_of_gpt_2(small: Any) -> None:
    config = small("GPT2", scale_attn_by_inverse_layer_idx=True)
    assert [spec.scale for spec in read_config(config).layers.values()] == [ROOT / n for n in (1, 2, 3, 4)]
    assert {spec.scale for spec in read_config(small("GPT2", scale_attn_weights=False)).layers.values()} == {
        1.0
    }


def test_keys_that_are_multiplied_by_zero_are_refused(small: Any) -> None:
    fields = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8}
    with pytest.raises(ModelConfigError, match=r"scale=0\.0"):
        read_config(small("FalconH1", key_multiplier=0.0, **fields))


def test_a_large_batch_is_measured_by_its_first_row(monkeypatch: pytest.MonkeyPatch, small: Any) -> None:
    forward = with_lines(modeling_llama.LlamaAttention, "query_states = query_states * 0.5")
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    monkeypatch.setattr(number_checks, "_MOST_ELEMENTS", 3000)
    with pytest.raises(ModelConfigError, match="elements; a LayerSpec cannot describe that"):
        read_config(small("Llama"))
    windows, positions = torch.zeros(8, 61, 64), torch.zeros(1, 61, 16)
    args, kwargs = number_checks._first_rows((windows,), {"cos": positions, "mask": windows, "layer": 8})
    assert [args[0].shape[0], kwargs["mask"].shape[0], kwargs["cos"].shape[0]] == [1, 1, 1]
    assert kwargs["layer"] == 8
