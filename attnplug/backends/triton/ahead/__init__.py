"""Kernels of TRITON compiled for GPUs that are not here."""

from __future__ import annotations
