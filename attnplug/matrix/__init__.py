"""The compatibility matrix: each cell is declared by a backend's class, and verified or refuted by a run."""

from __future__ import annotations

from attnplug.matrix.model import Cell, Finding, Matrix, Run, Status

__all__ = ["Cell", "Finding", "Matrix", "Run", "Status"]
