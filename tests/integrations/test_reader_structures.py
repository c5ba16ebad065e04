"""Attention in any structure of modules is read, refused, or named as not read."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from own_structures import (  # noqa: E402
    HEADS,
    SIZE,
    Biased,
    BlindLens,
    BlocksOfLongTexts,
    Capped,
    Copies,
    Einstein,
    Flattened,
    Fused,
    Lens,
    MambaBeside,
    Mixing,
    NestedModel,
    Outsourced,
    OverChannels,
    PlainlySeeing,
    Reweighted,
    SetsInView,
    SetsSome,
    ShapesConfig,
    SkippingModel,
    SkipsKeys,
    TorchsEncoder,
    TwoFactors,
    Windowed,
    WindowOfBuffer,
    WithSink,
    bridged,
    looking_through,
    stack_of,
)

from attnplug.core.spec import LayerSpec  # noqa: E402
from attnplug.errors import ModelConfigError  # noqa: E402
from attnplug.integrations.reader import architecture  # noqa: E402
from attnplug.integrations.transformers import read_config  # noqa: E402

SPEC = LayerSpec(
    num_heads=HEADS, num_kv_heads=HEADS, head_size=SIZE, attn_type="encoder_only", direct_kv=True
)


@pytest.fixture
def read(monkeypatch):
    """Reads a model class of the tests."""

    def read_class(cls, **options):
        # transformers replaces its own module when it is first asked for processors, so a test may have another one.
        monkeypatch.setattr(architecture.transformers, "ModelOfTests", cls, raising=False)
        return read_config(ShapesConfig(architectures=["ModelOfTests"]), **options)

    return read_class


def test_a_configuration_outside_of_any_package_has_no_other_classes():
    with pytest.raises(ModelConfigError, match="has no model class for shapes_of_tests"):
        read_config(ShapesConfig(architectures=["ClassOfNobody"]))


@pytest.mark.parametrize(
    ("block", "changes"),
    [
        (Mixing, {}),
        (TwoFactors, {"scale": 0.0625}),
        (Flattened, {}),
        (Fused, {"scale": 0.3, "attn_type": "decoder", "causal": True, "window": (-1, 0)}),
        (Windowed, {"attn_type": "decoder", "causal": True, "window": (199, 0)}),
        (WindowOfBuffer, {"attn_type": "decoder", "causal": True, "window": (199, 0)}),
    ],
)
def test_blocks_of_a_sequential_that_is_iterated_are_read(block, changes, read):
    model = read(stack_of(block))

    assert dict(model.layers) == {f"parts.trunk.{i}": SPEC.replace(**changes) for i in range(3)}
    assert not model.other_layers


@pytest.mark.parametrize("block", [Mixing, TwoFactors, Flattened, Fused, Windowed, WindowOfBuffer])
def test_the_spec_gives_the_numbers_of_the_module(block, read):
    spec = read(stack_of(block)).layers["parts.trunk.0"]
    torch.manual_seed(0)
    module = block().double()
    query, key, value = torch.randn(3, 1, HEADS, 300, SIZE, dtype=torch.float64).unbind()

    logits = query @ key.transpose(-2, -1) * spec.scale
    distance = torch.arange(300)[:, None] - torch.arange(300)
    left, right = spec.window
    hidden = (distance > left if left >= 0 else distance < -300) | (
        -distance > right if right >= 0 else distance < -300
    )
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ value

    torch.testing.assert_close(module.attend(query, key, value), expected)


def test_blocks_of_a_module_without_a_forward_are_read(read):
    model = read(NestedModel)

    assert dict(model.layers) == {"nest.first": SPEC, "nest.rest.0.0": SPEC}
    assert not model.other_layers


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Biased, "adds a mask or a bias of its own to its logits"),
        (Capped, "applies tanh to its logits"),
        (Reweighted, "applies mul to its weights"),
        (SetsSome, "sets some of its logits by __setitem__"),
        (SetsInView, "sets some of its logits by masked_fill_"),
        (WithSink, "applies cat to its logits"),
        (SkipsKeys, "applies __getitem__ to its logits"),
        (Einstein, "multiplies queries and keys by einsum"),
        (OverChannels, "may be no tokens"),
        (Copies, "attends 4 KV heads, but names 2"),
        (BlocksOfLongTexts, "attends otherwise in a text of 1021 tokens than in one of 61|are unknown"),
    ],
)
def test_attention_of_another_kind_is_refused_with_the_reason(block, reason, read):
    with pytest.raises(ModelConfigError, match=reason) as caught:
        read(stack_of(block))

    assert "parts.trunk.0: " in str(caught.value)
    assert "`attnplug explain`" in str(caught.value)


@pytest.mark.parametrize(
    "inside", [Mixing, lambda: torch.nn.MultiheadAttention(64, 4), lambda: torch.nn.Sequential(Mixing())]
)
def test_attention_in_a_projector_that_did_not_run_is_not_read(inside, read):
    model = read(bridged(inside))

    assert dict(model.layers) == {"parts.trunk.0": SPEC}
    assert list(model.other_layers) == list(model.unread) == ["bridge"]
    assert model.other_layers["bridge"].startswith("Bridge, not read: bridge.inside")
    assert "a run on text does not reach it" in model.unread["bridge"]


def test_a_tower_under_an_unusual_name_is_read_by_itself(read):
    model = read(looking_through(Lens))

    assert dict(model.layers) == {
        "parts.trunk.0": SPEC,
        "frame.left.ground.0": SPEC,
        "frame.left.ground.1": SPEC,
    }
    assert not model.other_layers


def test_a_tower_that_fails_is_not_read_for_its_own_reason(read):
    model = read(looking_through(BlindLens))

    assert list(model.layers) == ["parts.trunk.0"]
    assert "no light" in model.unread["frame.left"]


def test_layers_of_torchs_own_are_read(read):
    assert dict(read(TorchsEncoder).layers) == {f"encoder.layers.{i}.self_attn": SPEC for i in range(2)}


def test_products_in_a_module_without_weights_are_read(read):
    assert dict(read(stack_of(Outsourced)).layers) == {f"parts.trunk.{i}.products": SPEC for i in range(3)}


def test_attention_beside_a_mixer_of_another_kind_is_refused_if_it_did_not_run(read):
    with pytest.raises(
        ModelConfigError, match=r"parts\.trunk\.0\.spare: Mixing has attention that a run on text"
    ):
        read(stack_of(MambaBeside))


def test_a_block_that_was_skipped_is_refused(read):
    with pytest.raises(
        ModelConfigError, match=r"trunk\.1: Mixing has attention that a run on text does not reach"
    ):
        read(SkippingModel)


def test_a_tower_that_cannot_attend_is_no_attention(read):
    model = read(PlainlySeeing)

    assert dict(model.other_layers) == {"vision": "vision encoder"}
    assert not model.unread


def test_attention_of_its_own_is_refused_through_transformers(read):
    with pytest.raises(
        ModelConfigError, match="Mixing computes attention of its own and would never call attnplug"
    ):
        read(stack_of(Mixing), client="transformers")
