"""Diagrams from text: a fence ``{svgbob}`` becomes an SVG in the page, in the colours of its theme.

A repository viewer shows the text, which is a picture by itself. Drawn by svgbob while the page is
read: no program to install, no network, no script in the page. The argument describes the picture
for those who do not see it. What has a letter or a digit is text, also where svgbob would take a
slash in it for a line. 90 columns fit beside the table of contents.
"""

import html
import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinxcontrib.svgbob._svgbob import to_svg

# What svgbob's grid has; text is set into it here.
_CELL_X, _CELL_Y = 8, 16
# Words with a letter or a digit, up to a border or two spaces.
_ONE = r"(?<!\S)(?!v(?!\S))[^\s|]*[A-Za-z0-9<][^\s|]*"  # a lone v is an arrow's head
_TEXT = re.compile(rf"{_ONE}(?: {_ONE})*")


def drawn(text: str, label: str) -> str:
    """The SVG element; without styles of its own, so that manual.css gives it the theme's colours."""
    lines = text.splitlines()
    words = [
        f'<text x="{found.start() * _CELL_X}" y="{row * _CELL_Y + 12}"'
        f' textLength="{len(found[0]) * _CELL_X}">{html.escape(found[0])}</text>'
        for row, line in enumerate(lines)
        for found in _TEXT.finditer(line)
    ]
    art = "\n".join(_TEXT.sub(lambda found: " " * len(found[0]), line) for line in lines)
    width, height = max(map(len, lines)) * _CELL_X, len(lines) * _CELL_Y
    svg = to_svg(art, include_styles=False)
    svg = re.sub(
        r'width="[^"]*" height="[^"]*"', f'width="{width}" height="{height}"', svg, count=1
    )
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)
    return svg.replace("</svg>", "".join(words) + "</svg>")


class Diagram(SphinxDirective):
    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        svg = drawn("\n".join(self.content), self.arguments[0])
        return [nodes.raw("", f'<div class="diagram">{svg}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("svgbob", Diagram)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
