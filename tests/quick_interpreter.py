"""Triton's interpreter, made faster: what a launch has patched is not looked for again by each function it calls."""

from __future__ import annotations

import importlib

__all__ = ["patch_once_per_launch"]


def patch_once_per_launch() -> None:
    """Spare each call of a function by an interpreted kernel its search for members of Triton's language to replace.

    A launch replaces them all, and restores them when it ends. The interpreter repeats the search for every function
    that a kernel calls and finds nothing, which takes almost half of its time.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    tl = importlib.import_module("triton.language")
    # Other versions of Triton restore them in another way, and keep their own.
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope")):
        return
    patch = interpreter._patch_lang

    def patch_lang(fn):
        if any(map(tl.core.is_builtin, (tl.load, tl.core.load, tl.tensor.__add__))):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang
