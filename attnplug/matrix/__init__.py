"""The compatibility matrix: what backends declare, cell by cell, and what running them here has shown."""

from __future__ import annotations

from attnplug.matrix.model import Cell, Finding, Matrix, Run, Status

__all__ = ["Cell", "Finding", "Matrix", "Run", "Status"]
