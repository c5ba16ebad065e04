"""FLASH_ATTN_2, _3 and _4 on a GPU with their libraries: the kit at smoke level, and pages of NaN."""

from __future__ import annotations

import pytest

from attnplug.backends.flash_attn import FlashAttn2Backend, FlashAttn3Backend, FlashAttn4Backend
from attnplug.core import AttentionBackend, Device, LayerSpec
from attnplug.registry.plugins.installed import missing_requirements
from attnplug.registry.selection.gates import import_parts
from attnplug.testing import (
    assert_close,
    assert_lse_close,
    paged_batch,
    parametrize_with_checks,
    run_batch,
    tolerance,
)

pytestmark = [
    pytest.mark.gpu,
    # What the libraries warn of when they compile is none of attnplug's warnings.
    pytest.mark.filterwarnings("default", "error:::attnplug"),
]


def missing(backend: type[AttentionBackend]) -> str | None:
    """Why a backend cannot be run here, or None."""
    here = Device.current()
    lacking = [str(reason) for reason in missing_requirements(backend.requires)]
    if here.type not in backend.device_types:
        lacking.append(f"the device is {here}")
    elif here.capability is not None and not backend.supports_compute_capability(here.capability):
        lacking.append(f"{here} is not supported")
    if not lacking and (reasons := import_parts(backend)):
        lacking += map(str, reasons)
    return f"{backend.get_name()}: {'; '.join(lacking)}" if lacking else None


def kit(backend: type[AttentionBackend]) -> pytest.MarkDecorator:
    why = missing(backend)
    if why is not None:
        skipped = pytest.param(None, id="library", marks=pytest.mark.skip(reason=why))
        return pytest.mark.parametrize("check", [skipped])
    return parametrize_with_checks(backend)


@kit(FlashAttn2Backend)
def test_flash_attn_2(check):
    check()


@kit(FlashAttn3Backend)
def test_flash_attn_3(check):
    check()


@kit(FlashAttn4Backend)
def test_flash_attn_4(check):
    check()


@pytest.mark.parametrize("backend", [FlashAttn2Backend, FlashAttn3Backend, FlashAttn4Backend])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("asked", [{}, {"sliding_window": 40}, {"logits_soft_cap": 20.0}], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 256, 512])
def test_rows_of_nan_past_the_end_of_a_request_reach_nothing(backend, head_size, asked, block_size):
    if why := missing(backend):
        pytest.skip(why)
    spec = LayerSpec(
        num_heads=8, num_kv_heads=2, head_size=head_size, needs_lse=True, block_size=block_size, **asked
    )
    reasons = backend.validate_configuration(spec, Device.current())
    if reasons:
        pytest.skip(f"{backend.get_name()} refuses it: {reasons[0]}")
    # Lengths at each side of tiles and pages. All other rows of the pool are NaN.
    lens = [1, 15, 17, 63, 65, 79, 81, 127, 129, 255, 257, 300]
    for query_lens in ([1] * len(lens), [min(each, 9) for each in lens], lens):
        batch = paged_batch(spec, query_lens, lens, block_size=block_size, backend=backend, device="cuda")
        # Shared memory that earlier kernels left NaN in is as bad as pages that hold it: run it twice.
        for _ in range(2):
            output, lse = run_batch(backend, batch)
        expected, bound = batch.oracle(), tolerance(spec)
        tokens = batch.common.num_actual_tokens
        assert_close(output[:tokens], expected.output, bound.output)
        assert_lse_close(lse[:tokens], expected.lse, bound.lse)
