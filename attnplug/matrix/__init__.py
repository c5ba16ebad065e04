"""The compatibility matrix: each cell is declared by a backend's class, and verified or refuted by a run."""

from __future__ import annotations

from attnplug.matrix.model import Cell as Cell
from attnplug.matrix.model import Finding as Finding
from attnplug.matrix.model import Matrix as Matrix
from attnplug.matrix.model import Run as Run
from attnplug.matrix.model import Status as Status
