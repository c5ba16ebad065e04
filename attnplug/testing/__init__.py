"""The conformance kit for authors of backends, the float64 oracle, and batches with traps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core._lazy import lazy_exports

if TYPE_CHECKING:
    from attnplug.testing.batches import Batch as Batch
    from attnplug.testing.batches import direct_batch as direct_batch
    from attnplug.testing.batches import paged_batch as paged_batch
    from attnplug.testing.comparison import Tolerance as Tolerance
    from attnplug.testing.comparison import assert_close as assert_close
    from attnplug.testing.comparison import assert_lse_close as assert_lse_close
    from attnplug.testing.comparison import tolerance as tolerance
    from attnplug.testing.conformance.harness import run_batch as run_batch
    from attnplug.testing.conformance.listing import conformance_checks as conformance_checks
    from attnplug.testing.conformance.mistakes.single_step import (
        assert_step_correct as assert_step_correct,
    )
    from attnplug.testing.decorator import parametrize_with_checks as parametrize_with_checks
    from attnplug.testing.drawn_values import layer_tensors as layer_tensors
    from attnplug.testing.oracle import OracleResult as OracleResult
    from attnplug.testing.oracle import attention_oracle as attention_oracle
    from attnplug.testing.oracle import request_oracle as request_oracle
    from attnplug.testing.oracle import stored_values as stored_values
    from attnplug.testing.oracle import visible_keys as visible_keys

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "batches": "Batch direct_batch paged_batch",
        "comparison": "Tolerance assert_close assert_lse_close tolerance",
        "conformance.harness": "run_batch",
        "conformance.listing": "conformance_checks",
        "conformance.mistakes.single_step": "assert_step_correct",
        "decorator": "parametrize_with_checks",
        "drawn_values": "layer_tensors",
        "oracle": "OracleResult attention_oracle request_oracle stored_values visible_keys",
    },
)
