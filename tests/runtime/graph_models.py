"""Models on a backend that graphs can hold, and their graph states."""

from __future__ import annotations

from typing import Any

from fake_backends import offered
from graph_backends import graph_backend
from model_layers import layer
from served_model import ServedModel

from attnplug.core import AttentionCGSupport, BuilderConfig
from attnplug.runtime import GraphState

NEVER, SINGLE, UNIFORM, ALWAYS = AttentionCGSupport
FULL = layer(dtype="float32")
SLIDING = layer(dtype="float32", sliding_window=20)
CROSS = layer(dtype="float32", attn_type="encoder_decoder")
LONGEST = 64


def config(**changes: Any) -> BuilderConfig:
    given: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "cudagraph_batch_sizes": (4, 2)}
    return BuilderConfig(**given | changes)


def served(
    specs: Any = None,
    level: AttentionCGSupport = UNIFORM,
    debug: bool = False,
    drafts: int = 0,
    **asked: Any,
) -> ServedModel:
    """A model on a backend whose builders declare `level`; graphs of 2 and 4 requests."""
    with offered(graph_backend(level)):
        return ServedModel(
            specs or {"0": FULL, "1": SLIDING},
            config=config(num_speculative_tokens=drafts),
            max_model_len=LONGEST,
            debug=debug,
            **asked,
        )


def state_of(model: ServedModel, **asked: Any) -> GraphState:
    return GraphState(model.runtime, **{"max_model_len": LONGEST, "max_query_len": 3} | asked)


def encoder_decoder() -> tuple[ServedModel, GraphState]:
    model = served({"self": FULL, "cross": CROSS}, max_encoder_len=40)
    return model, state_of(model, max_encoder_len=40)
