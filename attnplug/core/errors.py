"""Every error attnplug raises, in one tree.

AttnplugError
├── SpecError (ValueError)              an invalid field of a LayerSpec or Device
├── BatchError (ValueError)             a batch that its layers cannot serve
├── LayoutError (ValueError)            KV cache shapes, strides or layouts that do not fit
├── PolicyError (ValueError)            an invalid backend rule, option or environment variable
│   └── UnknownBackendError (LookupError)   a name that no loaded plugin offers
├── ModelConfigError (ValueError)       a model configuration that cannot be read
├── MatrixFileError (ValueError)        a file of the compatibility matrix that cannot be read or written
├── BackendFaultError                   a backend that broke the contract while running
├── RankFailureError                    a rank that died, hangs, or decided otherwise than the others
├── PluginError                         a plugin asked for by name, or under strict mode, that did not load
└── NoBackendError                      no backend serves a layer; carries the Decision
    └── BackendUnavailableError         the backend asked for by name does not serve it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug._system.text import safe_text, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.core.reasons import Reason

__all__ = [
    "AttnplugError",
    "BackendFaultError",
    "BackendUnavailableError",
    "BatchError",
    "LayoutError",
    "MatrixFileError",
    "ModelConfigError",
    "NoBackendError",
    "PluginError",
    "PolicyError",
    "RankFailureError",
    "SpecError",
    "UnknownBackendError",
]


class AttnplugError(Exception):
    """The root of every error that attnplug raises on purpose. Its message is safe to print."""

    def __init__(self, message: str = "") -> None:
        super().__init__(safe_text(str(message)))


class _ArgumentError(AttnplugError, ValueError):
    """An argument, the value found, its limit, and what to do about it."""

    def __init__(self, field: str, value: object, limit: str, remedy: str | None = None) -> None:
        self.field = field
        self.value = value
        self.limit = limit
        self.remedy = remedy
        text = f"{field}={shown(value)} {limit}"
        super().__init__(f"{text}; {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[type[_ArgumentError], tuple[object, ...]]:
        # By default pickle would pass only the message to __init__, which needs the single facts.
        return type(self), (self.field, self.value, self.limit, self.remedy)


class SpecError(_ArgumentError):
    """An invalid field of a LayerSpec or Device: `field`, `value`, `limit`, `remedy`."""


class BatchError(_ArgumentError):
    """A batch argument out of its limits, or one that its layers' specs do not allow."""


class LayoutError(_ArgumentError):
    """A KV cache whose shape, strides, bytes or layout do not fit together."""


class PolicyError(_ArgumentError):
    """An invalid backend rule, option or environment variable."""


class UnknownBackendError(PolicyError, LookupError):
    """A backend name that no loaded plugin offers."""


class ModelConfigError(AttnplugError, ValueError):
    """A model configuration that cannot be read, or whose attention no LayerSpec can express.

    `unreadable` is true if its file is missing, or is not a configuration. `argument` names an argument of the call that
    does not fit the model.
    """

    def __init__(self, message: str = "", *, unreadable: bool = False, argument: str | None = None) -> None:
        self.unreadable = unreadable
        self.argument = argument
        super().__init__(message)


class MatrixFileError(AttnplugError, ValueError):
    """A file of the compatibility matrix that cannot be read or written: `path`, `what`, `remedy`."""

    def __init__(self, path: object, what: str, remedy: str | None = None) -> None:
        self.path = str(path)
        self.what = what
        self.remedy = remedy
        text = f"{path} {what}"
        super().__init__(f"{text}; {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[type[MatrixFileError], tuple[object, ...]]:
        return type(self), (self.path, self.what, self.remedy)


class BackendFaultError(AttnplugError):
    """A backend whose builder gave no metadata; or, found in debug mode, that wrote another shape or dtype, or NaN."""


class RankFailureError(AttnplugError):
    """A rank of several that died, did not answer in time, or made other decisions; `ranks` are its numbers."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)

    def __reduce__(self) -> tuple[type[RankFailureError], tuple[object, ...]]:
        return type(self), (str(self), self.ranks)


class PluginError(AttnplugError):
    """A plugin that did not load, if it was requested by name or strict mode is on."""


class NoBackendError(AttnplugError):
    """No backend serves a layer. `decision` holds every candidate with its reasons."""

    # The type is object, because core does not import the registry's Decision.
    def __init__(self, message: str, decision: object = None) -> None:
        self.decision = decision
        super().__init__(message)


class BackendUnavailableError(NoBackendError):
    """The backend asked for by name does not serve the layer; `reasons` says why."""

    def __init__(self, message: str, decision: object = None, reasons: Sequence[Reason] = ()) -> None:
        self.reasons = tuple(reasons)
        super().__init__(message, decision)
