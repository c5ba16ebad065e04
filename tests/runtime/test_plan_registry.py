"""A plan asks the registry that it is given, and not the one of the process."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backends import backend, plugin
from model_layers import FULL, SLIDING, model

from attnplug import Phase, Registry, plan
from attnplug.core.errors import NoBackendError
from attnplug.registry import default
from attnplug.runtime import ModelPlan


@pytest.fixture(autouse=True)
def no_registry_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("the process's registry was asked")

    monkeypatch.setattr(default, "get_registry", asked)
    monkeypatch.setattr("attnplug.planning.get_registry", asked)


@pytest.mark.parametrize("settings", [{}, {"per_phase": True}, {"uniform": True}, {"backend": "decode=OWN"}])
def test_only_the_registry_given_is_asked(settings: dict[str, Any]) -> None:
    own = Registry({"own": plugin(backend("OWN", 90))})
    made = plan(model([FULL, SLIDING]), "cpu", num_blocks=8, registry=own, **settings)
    assert made.backends == ("OWN",)
    again = ModelPlan.from_json(made.to_json(), own)
    assert again == made
    assert again.decisions["layers.0"].get_backend_cls() is own.backends()["OWN"]


def test_layers_that_the_registry_given_cannot_serve_are_refused() -> None:
    own = Registry({"own": plugin(backend("OWN", 90, supported_phases=(Phase.DECODE,)))})
    with pytest.raises(NoBackendError, match="OWN: "):
        plan(model([FULL]), "cpu", registry=own)
