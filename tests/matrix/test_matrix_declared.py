"""`declare`: what a class says of each cell, as a Run."""

from __future__ import annotations

import pytest

from attnplug.core.device import Device
from attnplug.matrix.declared import declare
from attnplug.matrix.layers import phase_of, spec_of
from attnplug.matrix.model import Status
from attnplug.registry.default import get_registry

BACKENDS = ("TORCH", "TRITON", "FLASH_ATTN_2", "FLASH_ATTN_4", "FLASHINFER")


@pytest.mark.parametrize("device", ["sm80", "sm90", "sm100", "rocm:9.4", "cpu"])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_cell_is_answered_as_the_class_answers_its_layer(name: str, device: str) -> None:
    backend = get_registry().backends()[name]
    for finding in declare(backend, device).findings:
        said = backend.validate_configuration(
            spec_of(finding.cell), Device.parse(device), phase_of(finding.cell)
        )
        if (
            finding.cell.layout is not None
            and finding.cell.layout not in backend.supported_kv_cache_layouts()
        ):
            assert finding.why[-1].startswith("KV layout not supported")
            assert list(finding.why[:-1]) == said
        else:
            assert list(finding.why) == said
        assert finding.status is (Status.REFUSED if finding.why else Status.DECLARED)
