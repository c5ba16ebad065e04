"""Text from plugins, files and users, made safe to print: it cannot control a terminal or reorder a line."""

from __future__ import annotations

import re

# ESC and the other control characters but tab and newline, lone surrogates, and invisible characters that
# reorder, hide or break text (Unicode TR36). A terminal may obey the C1 controls \x80-\x9f like ESC.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def safe_text(text: str) -> str:
    r"""`text` with each character that could control a terminal written as Python escapes it: `\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shown(value: object, most: int = 1000) -> str:
    """`repr(value)` for an error message, made safe and not longer than `most` characters.

    A value of a plugin or a caller may have a `repr` that raises or is very long.
    """
    try:
        text = str.__str__(repr(value))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (repr runs code of a plugin or a caller)
        text = f"<{type(value).__name__} without a repr: {type(error).__name__}>"
    return safe_text(text if len(text) <= most else f"{text[: most - 3]}...")


def shortened(text: str, most: int = 1000) -> str:
    """Text of a plugin made safe, and cut to `most` characters; its length is then told."""
    if len(text) > most:
        text = f"{text[: most - 40]}... ({len(text):,} characters)"
    return safe_text(text)
