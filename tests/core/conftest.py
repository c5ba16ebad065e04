"""Hypothesis without a deadline: no test here depends on the time it takes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

# pytest would try to collect a folder .hypothesis in the root.
set_hypothesis_home_dir(Path(__file__).parents[2] / ".pytest_cache" / "hypothesis")
settings.register_profile("attnplug", deadline=None, print_blob=True)
settings.load_profile("attnplug")
