"""The running forward of a watched model: its root, its positions, and the attention calls it has made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from transformers import PreTrainedModel


class ForwardPass(threading.local):
    """The outermost watched model that runs in this thread; a model that runs inside it changes nothing.

    `calls` counts attention calls served in this thread. `position_ids` are those of the caller. `masks` caches
    what was read from the caller's mask tensors.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._root: weakref.ref[PreTrainedModel] | None = None
        self._clear()

    def _clear(self) -> None:
        self._root = None
        self.position_ids: torch.Tensor | None = None
        self.masks: dict[Hashable, Any] = {}

    @property
    def root(self) -> PreTrainedModel | None:
        """The outermost model; None outside of a watched model's forward."""
        return None if self._root is None else self._root()

    def enter(self, model: PreTrainedModel) -> None:
        """Note that the forward of `model` begins."""
        root = self.root
        # A compiled model runs no hook after an error, so a root may be left from an earlier forward.
        if root is None or root is model or all(part is not model for part in root.modules()):
            self._clear()
            self._root = weakref.ref(model)

    def leave(self, model: PreTrainedModel) -> None:
        """Note that the forward of `model` ends."""
        if self.root is model:
            self._clear()


forward_pass = ForwardPass()
"""The state of each thread."""
