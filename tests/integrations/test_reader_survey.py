"""Every family that transformers knows is read, or refused with a reason."""

from __future__ import annotations

import pytest

from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config

# Going through a mapping imports every modelling file, some of which use what torch deprecates.
pytestmark = [pytest.mark.slow, pytest.mark.rare, pytest.mark.filterwarnings("ignore")]

transformers = pytest.importorskip("transformers")
modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_every_default_configuration_is_read_or_refused(mapping):
    outcomes = {}
    for config_class, model_class in getattr(modeling_auto, mapping).items():
        try:
            config = config_class()
        except Exception:
            continue  # a configuration that needs values has no default to read
        chosen = model_class[0] if isinstance(model_class, tuple) else model_class
        config.architectures = [chosen.__name__]
        try:
            model = read_config(config)
        except ModelConfigError:
            outcomes[config_class.model_type] = False
        else:
            assert model.layers or model.other_layers
            outcomes[config_class.model_type] = True

    assert sum(outcomes.values()) > len(outcomes) / 3


def test_few_default_configurations_are_refused_for_want_of_inputs():
    refused = {}
    for name in transformers.CONFIG_MAPPING:
        try:
            config = transformers.CONFIG_MAPPING[name]()
        except Exception:
            continue
        try:
            read_config(config)
        except ModelConfigError as error:
            refused[name] = str(error)

    unrun = [name for name, reason in refused.items() if "cannot be run without data" in reason]
    assert len(unrun) < len(transformers.CONFIG_MAPPING) / 10, unrun
    assert len(refused) < len(transformers.CONFIG_MAPPING) / 2
