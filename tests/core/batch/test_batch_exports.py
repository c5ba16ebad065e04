"""What the package offers, and that asking for its names costs nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnplug.core import batch


def test_the_package_imports_no_torch() -> None:
    code = "import sys, attnplug.core.batch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", batch.__all__)
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    assert name in dir(batch)
    assert getattr(batch, name).__doc__
    assert getattr(batch, name).__name__ == name


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'split_everything'"):
        batch.split_everything  # noqa: B018
