"""Letting a model run without data although some of its parts choose by value, as routers of experts do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from attnplug.integrations.reader.mixers import works_on_single_tokens

__all__ = ["substituted"]


@contextlib.contextmanager
def substituted(model: PreTrainedModel, active: bool) -> Iterator[None]:
    """Inside the block, if `active`, an MLP or mixture of experts that fails gives its input back instead.

    Only what attention is asked for is recorded, never a value, so the input serves as well as the
    output where their shapes agree; where they do not, the part around it fails in turn.
    """
    parts = [module for module in model.modules() if works_on_single_tokens(module)]
    changed = []
    try:
        if active:
            for part in parts:
                part.forward = _forgiving(part.forward)
                changed.append(part)
        yield
    finally:
        for part in changed:
            del part.forward


def _forgiving(forward: Callable[..., Any]) -> Callable[..., Any]:
    def attempt(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:
            for given in (*args, *kwargs.values()):
                if isinstance(given, torch.Tensor) and given.is_floating_point():
                    return given
            raise

    return attempt
