"""What no LayerSpec can say is refused, also in a class that nobody has looked at."""

from __future__ import annotations

import pytest

from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("T5", {"d_model": 64, "num_layers": 1}, r"relative position bias \(T5-like\)"),
        ("LongT5", {"d_model": 64, "num_layers": 1}, "relative position bias"),
        ("Deberta", {}, "cannot be checked"),
        ("DebertaV2", {}, "computes attention of its own"),
        ("XLNet", {"d_model": 64, "n_layer": 1, "n_head": 4}, "cannot be checked"),
        ("BigBird", {"max_position_embeddings": 4096}, "attends otherwise in a text of 1021 tokens"),
        ("Longformer", {"attention_window": 8}, "cannot be checked"),
        ("Funnel", {}, "cannot be checked"),
        ("Reformer", {"axial_pos_embds_dim": (32, 32)}, "cannot be checked"),
        ("LED", {}, "cannot be checked"),
        ("FNet", {"dtype": "float32"}, "mixes tokens"),
        ("DiffLlama", {}, "calls attention more than once"),
        (
            "MiniMaxM3VLText",
            {"layer_types": ["minimax_m3_sparse"] * 4},
            "selects whole blocks of keys",
        ),
        ("Doge", {}, "alters the mask"),
        ("Bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("Bert", {"position_embedding_type": "relative_key_query"}, "relative position"),
        ("Mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi=False"),
        ("Mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln=True"),
    ],
)
def test_attention_that_a_spec_cannot_describe_is_refused(name, fields, reason, small):
    with pytest.raises(ModelConfigError, match=reason):
        read_config(small(name, **fields))


def test_the_message_names_the_layer_and_is_one_sentence(small):
    with pytest.raises(ModelConfigError) as caught:
        read_config(small("T5", d_model=64, num_layers=1))

    assert str(caught.value) == (
        "encoder.block.0.layer.0.SelfAttention: T5Attention adds a relative position bias (T5-like) to its logits; "
        "a LayerSpec cannot describe that; describe its layers by LayerSpecs of your own, which attnplug.plan takes; "
        "`attnplug explain` shows what serves one"
    )


def test_a_keyword_that_attention_did_not_have_before_is_refused(small, monkeypatch):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    forward = modeling.LlamaAttention.forward
    monkeypatch.setattr(
        modeling.LlamaAttention, "forward", lambda self, *a, **k: forward(self, *a, **k, temperature=2.0)
    )

    with pytest.raises(ModelConfigError, match="passes temperature to attention"):
        read_config(small("Llama"))


def test_a_change_of_the_classes_own_attention_is_noticed(small, monkeypatch):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    eager = modeling.eager_attention_forward

    def talking_heads(module, query, key, value, *args, **kwargs):
        output, weights = eager(module, query, key, value, *args, **kwargs)
        return output.flip(2), weights

    talking_heads.__name__ = "eager_attention_forward"
    monkeypatch.setattr(modeling, "eager_attention_forward", talking_heads)

    with pytest.raises(ModelConfigError, match="gives other numbers than its arguments say"):
        read_config(small("Llama"))


def test_a_bias_added_to_the_mask_is_noticed(small, monkeypatch):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    create = modeling.create_causal_mask
    monkeypatch.setattr(modeling, "create_causal_mask", lambda **k: create(**k) + 1.0)

    with pytest.raises(ModelConfigError, match="alters the mask or adds a bias"):
        read_config(small("Llama"))


def test_a_mask_of_another_pattern_is_noticed(small, monkeypatch):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    create = modeling.create_causal_mask

    def dilated(batch, head, query, key):
        return (query - key) % 2 == 0

    monkeypatch.setattr(modeling, "create_causal_mask", lambda **k: create(**k, and_mask_function=dilated))

    with pytest.raises(ModelConfigError, match="neither full, causal, a window nor chunks"):
        read_config(small("Llama"))


def test_a_window_beside_a_mask_that_does_not_have_it_is_noticed(small, monkeypatch):
    modeling = pytest.importorskip("transformers.models.mistral.modeling_mistral")
    causal = modeling.create_causal_mask
    monkeypatch.setattr(modeling, "create_sliding_window_causal_mask", causal)

    with pytest.raises(ModelConfigError, match="passes sliding_window=16, which contradicts its mask"):
        read_config(small("Mistral", sliding_window=16))


def test_attention_that_goes_round_the_interface_is_noticed(small, monkeypatch):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")

    def forward(self, hidden_states, **_):
        query = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        output = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        return self.o_proj(output.transpose(1, 2).flatten(2)), None

    monkeypatch.setattr(modeling.LlamaAttention, "forward", forward)

    with pytest.raises(ModelConfigError, match="LlamaAttention computes attention of its own"):
        read_config(small("Llama"))


def test_attention_without_a_softmax_is_noticed(small, monkeypatch):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(
        modeling.LlamaAttention, "forward", lambda self, hidden_states, **_: (hidden_states, None)
    )

    with pytest.raises(ModelConfigError, match="does not go through transformers' attention interface"):
        read_config(small("Llama"))
