"""Writes the page of kernel libraries from the table in the code: `python docs/kernel_libraries.py`."""

from __future__ import annotations

from pathlib import Path

from attnplug.backends.libraries import LIBRARY_RULES, LibraryRule
from attnplug.backends.unbound_libraries import UNBOUND_LIBRARIES, UnboundLibrary

PAGE = Path(__file__).parent / "reference" / "kernel-libraries.md"

INTRODUCTION = """# Kernel libraries

This page lists the features that each version of a kernel library supports on NVIDIA GPUs. `attnplug doctor` shows which
libraries are installed on your machine, and which are broken. Generations of FlashAttention share a package folder. So
attnplug counts a library as installed only if its own distribution installed the file that Python would import. This page is
written by `docs/kernel_libraries.py` from `attnplug/backends/libraries.py`, which the backends read too.
"""

UNBOUND = """
## Not called

These kernels decode latent attention (MLA), and no backend of attnplug calls them. `attnplug doctor` names those that are
installed. [Ship an MLA backend](../guides/ship-an-mla-backend.md) shows how a plugin calls one.

| library | found in | compute capability | what it does | why not | instead |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page as Markdown."""
    served = [rule for rule in LIBRARY_RULES if rule.serves]
    refused = [rule for rule in LIBRARY_RULES if not rule.serves]
    parts = [INTRODUCTION, "\n## Served\n\n"]
    parts.append(
        "| backend | library | install | compute capability | what it does | compiled at first use |\n"
    )
    parts.append("|---|---|---|---|---|---|\n")
    for rule in served:
        install = f"`{rule.distribution}{rule.versions}`"
        cells = (
            f"`{rule.backend}`",
            rule.library,
            install,
            _words(rule),
            rule.what,
            rule.compiles or "nothing",
        )
        parts.append(_row(cells))
    parts.append(
        "\n## Refused\n\n| library | versions | compute capability | why | instead |\n|---|---|---|---|---|\n"
    )
    for rule in refused:
        cells = (rule.library, f"`{rule.versions}`", _words(rule), rule.what, f"`{rule.remedy}`")
        parts.append(_row(cells))
    parts.append(UNBOUND)
    for each in UNBOUND_LIBRARIES:
        told = each.library, each.found_in, _words(each), each.what, each.why, f"`{each.instead}`"
        parts.append(_row(told))
    return "".join(parts)


def _words(rule: LibraryRule | UnboundLibrary) -> str:
    return " and ".join(f"`{part}`" for part in rule.capabilities.split(","))


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
