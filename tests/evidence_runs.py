"""Runs of the compatibility matrix as JSON has them, for tests of what is made of their refuted cells."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

__all__ = ["VERSIONS", "WHY", "cell", "run"]

VERSIONS = {"Python": platform.python_version(), "torch": version("torch")}
WHY = "output[0, 3, 11]: -2.42042 is not -0.253114"


def cell(
    feature: str = "plain", phase: str = "mixed", status: str = "refuted", **values: Any
) -> dict[str, Any]:
    """A cell of the plainest values: head size 64 in bfloat16, pages of 16 tokens in NHD."""
    plain = {
        "head_size": 64,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "layout": "NHD",
    }
    about = {"feature": feature, "phase": phase, **plain, "status": status}
    return {**about, "why": [WHY] if status == "refuted" else [], **values}


def run(backend: str, *cells: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """A run of a backend that nobody ships, on this machine's CPU with the versions installed now."""
    return {
        "backend": backend,
        "distribution": None,
        "version": None,
        "device": "cpu",
        "device_name": None,
        "versions": VERSIONS,
        "date": "2026-11-21T18:00:00+00:00",
        "commit": None,
        "cells": list(cells),
        **facts,
    }
