"""Triton's interpreter, made faster: what it repeats in each operation is done once, with equal answers and errors."""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import numpy as np

__all__ = ["make_interpreter_quick"]

# The functions that are replaced were read in these versions; others keep their own.
_READ = ("3.7",)


def make_interpreter_quick() -> None:
    """Replace what takes most of the time of an interpreted kernel."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    core = importlib.import_module("triton.language.core")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    # Other versions of Triton restore patched members in another way.
    if all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope")):
        _patch_once_per_launch(interpreter, core)
    version = importlib.import_module("triton").__version__
    if version.rpartition(".")[0] in _READ:
        _keep_types(interpreter, core)
        _skip_vain_overflows(semantic)
        _leave_equal_shapes(semantic)


def _patch_once_per_launch(interpreter: Any, core: Any) -> None:
    """Spare each call of a function by an interpreted kernel its search for members of Triton's language to replace.

    A launch replaces them all, and restores them when it ends. The interpreter repeats the search for every function
    that a kernel calls and finds nothing, which takes almost half of its time.
    """
    tl = importlib.import_module("triton.language")
    patch = interpreter._patch_lang

    def patch_lang(fn: Any) -> Any:
        if any(map(core.is_builtin, (tl.load, core.load, tl.tensor.__add__))):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang


def _keep_types(interpreter: Any, core: Any) -> None:
    """Make equal types of blocks, and the shapes of their tensors, once."""
    make_block_type = core.block_type.__init__

    @functools.cache
    def parts_of_block(element: Any, shape: tuple[int, ...]) -> dict[str, Any]:
        made = object.__new__(core.block_type)
        make_block_type(made, element, list(shape))
        return vars(made)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, (list, core.tuple))
        if isinstance(element_ty, core.pointer_type):
            make_block_type(self, element_ty, shape)  # it cannot be hashed
            return
        sizes = tuple(each.value if isinstance(each, core.constexpr) else each for each in shape)
        vars(self).update(parts_of_block(element_ty, sizes))

    @functools.cache
    def shape_and_elements(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - its name in Triton
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_elements(tuple(type.shape) if type.is_block() else ())

    of_scalar = functools.cache(interpreter._get_np_dtype)

    def numpy_dtype(of: Any) -> Any:
        element = of.element_ty if isinstance(of, core.block_type) else of
        return np.dtype(np.uint64) if isinstance(element, core.pointer_type) else of_scalar(element)

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = numpy_dtype


def _skip_vain_overflows(semantic: Any) -> None:
    """Leave out the sums in 64 bits whose overflow only a run with `debug` asserts; others compute and drop them."""
    check = semantic.binary_op_sanitize_overflow_impl

    def check_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, binary_op)

    semantic.binary_op_sanitize_overflow_impl = check_overflow


def _leave_equal_shapes(semantic: Any) -> None:
    """Give back operands of equal shapes without a look at each size."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_value(self: Any, lhs: Any, rhs: Any) -> Any:
        # Tensors of equal shapes have the same object: see `_keep_types`.
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_value
