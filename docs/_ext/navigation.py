"""The manual's table of contents, out of sight in a repository viewer.

    <!-- toctree How to:
    howto/resume
    Metrics <howto/metrics>
    -->

becomes a hidden ``toctree``, with that caption if there is one. ``*`` stands for all other pages.
"""

import re

from sphinx.application import Sphinx

_MARK = re.compile(
    r"^<!-- toctree(?: (?P<caption>[^:\n]+))?:\n(?P<pages>.+?)\n-->$", re.MULTILINE | re.DOTALL
)


def _toctree(found: re.Match[str]) -> str:
    caption = f":caption: {found['caption']}\n" if found["caption"] else ""
    return f"```{{toctree}}\n:hidden:\n:glob:\n{caption}\n{found['pages']}\n```"


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = _MARK.sub(_toctree, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
