"""Limits of FlashInfer's kernels that both the declaration and the calls check; torch-free."""

from __future__ import annotations

LEAST_SCALE = 2.0**-11
"""FlashInfer before 0.7.2 masks with a logit of -50000 and then scales it: at this scale it still weighs nothing."""
