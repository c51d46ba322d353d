"""In tables of the site, long names break at dots, underscores and capitals, not inside a word."""

from __future__ import annotations

import re
from typing import Any

SHORT = 12
"""Characters of code that stays on one line, its hyphens included."""
_TABLE = re.compile(r"<table>.*?</table>", re.S)
_CODE = re.compile(r"<code>([^<]*)</code>")
_OPTION = re.compile(r"--\w+")
_BETWEEN = re.compile(
    r"(?<=[a-z0-9])(?=[A-Z])|(?<=[\w\])][_/=,(])(?=[\w\"'\[&*-])|(?<=\w\.)(?=[A-Za-z_]{4})"
)


def on_post_page(output: str, **given: Any) -> str:
    """Called by mkdocs with a finished page, after its text has gone into the index of the search."""
    return _TABLE.sub(lambda table: _CODE.sub(_breakable, table[0]), output)


def _breakable(code: re.Match[str]) -> str:
    if len(code[1]) <= SHORT:
        return f'<code class="short">{code[1]}</code>'
    text = _BETWEEN.sub("<wbr>", code[1])
    return f"<code>{_OPTION.sub(_whole, text)}</code>"


def _whole(option: re.Match[str]) -> str:
    return f'<span class="short">{option[0]}</span>'
