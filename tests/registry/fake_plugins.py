"""Plugins made on the spot, for tests of what is made of them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from attnplug import AttentionBackend, Device, Feature, LayerSpec, Registry, hookimpl
from attnplug.backends.torch_native import TorchBackend

CPU = Device("cpu")
H100 = Device("cuda", (9, 0))
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
SLIDING = SPEC.replace(sliding_window=128)


class Serves(AttentionBackend):
    """Serves every dense layer on CPUs and NVIDIA GPUs; its doors open at once."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    features = ~Feature(0) & ~(Feature.MLA | Feature.SPARSE | Feature.STATE)

    @staticmethod
    def get_name() -> str:
        return "SERVES"

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        return TorchBackend.get_impl_cls()

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return TorchBackend.get_builder_cls()


def backend(
    name: str, priority: object = 50, *, base: type[AttentionBackend] = Serves, **attributes: Any
) -> type[AttentionBackend]:
    """A backend called `name`; functions among its attributes are called without the class."""
    made = {key: _method(value) for key, value in attributes.items()}
    made.setdefault("get_priority", _method(lambda *asked: priority))
    return type(name, (base,), {"get_name": staticmethod(lambda: name), **made})


def _method(value: Any) -> Any:
    return staticmethod(value) if isinstance(value, types.FunctionType) else value


def raises(error: BaseException) -> Callable[..., Any]:
    """A function that raises `error`, whatever it is given."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def plugin(
    *backends: type[AttentionBackend], rank: Callable[..., Any] | None = None, **attributes: Any
) -> types.ModuleType:
    """A module with the hooks; `rank(candidates)` becomes its attnplug_rank."""
    module = types.ModuleType("made_on_the_spot")

    @hookimpl
    def attnplug_backends() -> list[type[AttentionBackend]]:
        return list(backends)

    @hookimpl
    def attnplug_rank(spec: Any, device: Any, phase: Any, candidates: Any) -> Any:
        assert rank is not None
        return rank(candidates)

    members: dict[str, Any] = {"ATTNPLUG_API": (1, 1), "attnplug_backends": attnplug_backends}
    if rank is not None:
        members["attnplug_rank"] = attnplug_rank
    vars(module).update({**members, **attributes})
    return module


def registry(*backends: type[AttentionBackend], **attributes: Any) -> Registry:
    """A registry of one plugin called "fakes" with these backends."""
    return Registry({"fakes": plugin(*backends, **attributes)})
