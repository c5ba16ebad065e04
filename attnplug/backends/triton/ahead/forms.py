"""The forms of kernels: what the compiler is given for one, and what became of it on a chip."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Self

import triton


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A kernel with the types, constants and options that it is compiled with.

    Two are equal if Triton compiles them to the same code.

    Args:
        function: made by `triton.jit`.
        signature: types of the arguments by name.
        constexprs: values compiled in, by place.
        attrs: divisibility of arguments, by place.
        options: of the compiler.
    """

    function: Any
    signature: Mapping[str, str]
    constexprs: Mapping[tuple[int, ...], Any]
    attrs: Mapping[tuple[int, ...], Any]
    options: Any

    @classmethod
    def of(cls, function: Any, signature: Any, constexprs: Any, attrs: Any, options: Any) -> Self:
        """The form that Triton would compile for a launch."""
        return cls(function, dict(signature), dict(constexprs), dict(attrs), options)

    @property
    def source(self) -> Any:
        """What Triton's compiler takes."""
        return self.function.ASTSource(self.function, self.signature, self.constexprs, self.attrs)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.function.__name__)

    @property
    def key(self) -> str:
        """A hash of the source and all that is compiled in; equal for two with the same code, wherever Triton is installed."""
        # Triton's own hash of the options has the places of its libraries, which differ between environments.
        options = {
            **self.options.__dict__,
            "extern_libs": sorted(name for name, _ in self.options.extern_libs),
        }
        compiler = f"{triton.__version__}-{sorted(options.items())}"
        return hashlib.sha256(f"{self.source.hash()}-{compiler}".encode()).hexdigest()[:16]

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that are on, by name."""
        names = self.function.arg_names
        found = {names[path[0]]: value for path, value in self.constexprs.items()}
        return {name: value for name, value in found.items() if value not in (None, False)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        """Such as "prefill_kernel(GROUP=4, BLOCK_M=16)"."""
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.constants.items())})"
