"""The random weights of served_models.py make attention matter."""

from __future__ import annotations

import pytest
import random_weights
import torch


def test_random_weights_have_a_useful_size_and_are_the_same_each_time() -> None:
    class RMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(64))

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj, self.q_size = torch.nn.Linear(256, 192), 64
            self.norm, self.sinks = RMSNorm(), torch.nn.Parameter(torch.zeros(8))

    one, other = Attention(), Attention()
    random_weights.fill(one, None)
    random_weights.fill(other, None)
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
    given = torch.randn(512, 256)
    made = one.qkv_proj(given).detach()
    assert made[:, :64].std() == pytest.approx(random_weights.SHARPNESS, rel=0.1)
    assert made[:, 64:].std() == pytest.approx(1.0, rel=0.1)
    assert one.norm.weight.eq(1).all()
    assert one.sinks.std() > 0.1
