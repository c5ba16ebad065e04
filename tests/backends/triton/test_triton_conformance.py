"""TRITON passes the conformance kit: on the GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from slow_kits import slow_kit

from attnplug.backends.triton import TritonBackend

ON_GPU = torch.cuda.is_available()
INTERPRETER = {
    "*runtime/threads": "Triton's interpreter keeps the running program in its modules, for all threads"
}


# Triton's interpreter takes maxima by numpy, which warns of rows of NaN. The case of strangers has such requests.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@slow_kit(TritonBackend, device="cuda" if ON_GPU else "cpu", known_failures={} if ON_GPU else INTERPRETER)
def test_conformance(check):
    check()
