"""The model class of a configuration, and a model of it built without weights.

Finds transformers' own family and class for a configuration that names remote code, which is never run.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from attnplug.core.errors import ModelConfigError
from attnplug.integrations.model_spec import family_note
from attnplug.integrations.reader.config_json import one_line
from attnplug.integrations.reader.device_mode import SquaresOfOnes


def with_known_types(data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """`data` with the family of its `architectures` for a model_type that transformers lacks, and a note of each.

    Configurations inside it are changed likewise. Without a family a name stays as it is.
    """
    notes: list[str] = []

    def known(part: Mapping[str, Any], where: str) -> dict[str, Any]:
        changed = {
            name: known(value, f"{where}{name}.")
            if isinstance(value, dict) and "model_type" in value
            else value
            for name, value in part.items()
        }
        name, classes = part.get("model_type"), part.get("architectures")
        if not isinstance(name, str) or name in CONFIG_MAPPING or not isinstance(classes, list):
            return changed
        for cls in classes:
            if isinstance(cls, str) and (family := _family_of(cls)):
                notes.append(
                    family_note(f"{where}model_type {name!r}", transformers.__version__, family, cls)
                )
                return {**changed, "model_type": family}
        return changed

    return known(data, ""), tuple(notes)


def _family_of(class_name: str) -> str | None:
    """The model type of transformers' class of that name."""
    tables = (table for name, table in vars(modeling_auto).items() if name.endswith("MAPPING_NAMES"))
    found = [
        str(family)
        for table in tables
        if isinstance(table, Mapping)
        for family, classes in table.items()
        if class_name in ((classes,) if isinstance(classes, str) else classes)
    ]
    # Other families use the class too, with sizes of their own: InternLM3 has that of Llama.
    own = [family for family in found if _plain(class_name).startswith(_plain(family))]
    return max(own, key=len) if own else next(iter(found), None)


# Parts of a model. DeepSeek-V3 has about 1,300, since transformers keeps the experts of a layer in one module.
_MOST_MODULES = 60_000
_TOWERS = ("vision_config", "audio_config", "speech_config")


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def model_class(config: PreTrainedConfig) -> tuple[type[PreTrainedModel], str]:
    """The class named in `architectures`, else the family's class for this kind of configuration.

    Also a sentence if transformers has no class that `architectures` names, or has it for another family, else "".
    """
    named = [name for name in config.architectures or () if isinstance(name, str)]
    found: Any
    for name in named:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            if _takes(found, config):
                return found, ""
            own = _class_of_family(config)
            return own, (
                f"architectures names {name}, which does not take the configuration of the family "
                f"{config.model_type!r}; its {own.__name__} was read"
            )
    if not named:
        return _class_of_family(config), ""
    # Names may differ in case and underscores, such as PhimoeForCausalLM and PhiMoEForCausalLM.
    classes = {_plain(cls.__name__): cls for cls in reversed(list(_classes_of_package(config)))}
    found = next(filter(None, (classes.get(_plain(name)) for name in named)), None) or _class_of_family(
        config
    )
    return found, (
        f"architectures names {', '.join(named)}, which transformers {transformers.__version__} does not have; "
        f"its {found.__name__}, of the family {config.model_type!r}, was read, and code of its own was not run"
    )


def _takes(cls: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether a class is made for this kind of configuration, or for the text part of it."""
    kind: Any = cls.config_class
    return (
        not isinstance(kind, type) or isinstance(config, kind) or isinstance(config.get_text_config(), kind)
    )


def _class_of_family(config: PreTrainedConfig) -> type[PreTrainedModel]:
    for mapping in _mappings(config):
        try:
            found = mapping.get(type(config), None)
        except ValueError:
            continue  # the mapping names a class that transformers does not export
        if found is not None:
            first: type[PreTrainedModel] = found[0] if isinstance(found, (tuple, list)) else found
            return first
    declared = list(_classes_of_package(config))
    if not declared:
        raise ModelConfigError(
            f"transformers {transformers.__version__} has no model class for {config.model_type}; "
            "read the configuration of the whole model"
        )
    # The last base model contains those before it; classes for a task add heads to it.
    return next((cls for cls in reversed(declared) if "For" not in cls.__name__), declared[-1])


def _classes_of_package(config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """Model classes beside the configuration's class that take it, in the order of their files."""
    package = type(config).__module__.rpartition(".")[0]
    # A module outside of any package, such as a caller's own, has no modelling files beside it.
    folder = importlib.util.find_spec(package) if package else None
    places = folder.submodule_search_locations if folder else None
    names = sorted(info.name for info in pkgutil.iter_modules(places or ()))
    for name in (name for name in names if name.startswith("modeling_")):
        module = importlib.import_module(f"{package}.{name}")
        for cls in vars(module).values():
            if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
                continue
            taken = getattr(cls.__init__, "__annotations__", {}).get("config", cls.config_class)
            is_own = cls.__module__ == module.__name__ and cls.forward is not torch.nn.Module.forward
            if is_own and taken in (type(config), type(config).__name__):
                yield cls


def _mappings(config: PreTrainedConfig) -> Iterator[Any]:
    if getattr(config, "is_encoder_decoder", False):
        yield modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        yield modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    elif any(name in config.sub_configs for name in _TOWERS):
        yield modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        yield modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING
        yield modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    elif getattr(config, "is_decoder", False):
        yield modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    else:
        yield modeling_auto.MODEL_FOR_MASKED_LM_MAPPING
        yield modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    yield modeling_auto.MODEL_MAPPING


@contextlib.contextmanager
def modules_limited() -> Iterator[None]:
    """Inside the block, ModelConfigError when a model gets more parts than any model that can be read."""
    count = 0

    def registered(module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES:
            raise ModelConfigError(
                f"the model has more than {_MOST_MODULES} modules; lower the numbers of layers, experts or heads"
            )

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def build_model(config: PreTrainedConfig, attention: str | dict[str, str]) -> PreTrainedModel:
    """The model on the meta device, in evaluation mode, with the attention function of that name.

    `config` is copied, not changed. A class that cannot be built raises ModelConfigError. A class whose own
    table of attention functions lacks the name raises KeyError of that name.
    """
    cls: Any
    try:
        cls, _ = model_class(config)
    except ModelConfigError:
        raise
    except Exception as error:  # importing a modelling file may raise anything
        raise ModelConfigError(
            f"transformers {transformers.__version__} has no usable model class for {config.model_type}: "
            f"{one_line(error)}"
        ) from error
    # Building sets the attention function in the configuration, which belongs to the caller.
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if text is not config and cls.config_class is type(text):
        config = text
    try:
        # Meta tensors have shapes without data, so a model of any size is built without its weights.
        with torch.device("meta"), SquaresOfOnes(), modules_limited():
            model: PreTrainedModel = cls._from_config(
                config, attn_implementation=attention, dtype=_dtype(config)
            )
    except Exception as error:
        names = attention.values() if isinstance(attention, dict) else (attention,)
        # The caller tries another name if the class has a table of attention functions of its own.
        if type(error) is KeyError and error.args[0] in names:
            raise
        why = (
            f"transformers {transformers.__version__} cannot build {cls.__name__} from it"
            f"{_doubtful(config)}: {type(error).__name__}: {one_line(error)}"
        )
        if isinstance(error, ImportError):
            why = f"{cls.__name__} needs a package that is not installed: {one_line(error)}"
        if isinstance(error, AttributeError) and isinstance(error.obj, PreTrainedConfig):
            family = error.obj.model_type or type(error.obj).__name__
            why = f"the {family} configuration lacks the field {error.name}, which {cls.__name__} needs"
        raise ModelConfigError(why, unreadable=bool(_doubtful(config))) from error
    model.train(False)
    return model


def _dtype(config: PreTrainedConfig) -> torch.dtype:
    dtype = config.dtype if config.dtype is not None else config.get_text_config().dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if dtype is None:
        return torch.bfloat16
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ModelConfigError(
            f"dtype={str(dtype).removeprefix('torch.')}: must be float16, bfloat16 or float32"
        )
    return dtype


_SIZES = ("head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")


def _doubtful(config: PreTrainedConfig) -> str:
    """The sizes of a configuration below 1, in words."""
    # They are the likely cause of a model that cannot be built.
    found = {name: getattr(config, name, None) for name in _SIZES}
    wrong = [f"{name}={size}" for name, size in found.items() if isinstance(size, (int, float)) and size < 1]
    return f", which has {' and '.join(wrong)}" if wrong else ""
