"""Reads the plots that matplotlib drew: where marks and ticks are."""

from __future__ import annotations

from xml.etree import ElementTree as ET

__all__ = ["marks_of", "ticks_of"]

_SVG = "{http://www.w3.org/2000/svg}"


def marks_of(svg: str) -> dict[str, float]:
    """The horizontal place of each mark, by its name, row and value."""
    groups = (
        (each.get("id", ""), each.find(f".//{_SVG}use")) for each in ET.fromstring(svg).iter(f"{_SVG}g")
    )
    return {name: float(use.get("x", 0)) for name, use in groups if " | " in name and use is not None}


def ticks_of(svg: str) -> dict[str, float]:
    """The horizontal place of each tick of the lower axis, by its words."""
    found = {}
    for each in ET.fromstring(svg).iter(f"{_SVG}g"):
        if each.get("id", "").startswith("xtick_"):
            text = next(each.iter(f"{_SVG}text"))
            use = each.find(f".//{_SVG}use")
            place = use.get("x") if use is not None else text.get("x")
            found[str(text.text).strip()] = float(place or 0)
    return found
