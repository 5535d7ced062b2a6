"""A matplotlib figure as SVG that suits its surroundings, and as PNG.

Matplotlib's SVG becomes: text that is text; ink in the page's own text colour (currentColor), the palette in
CSS variables with the light colours as fallback, so that one drawing is right in light and in dark; a title and
a description for who cannot see it; ids that are unique on a page of many; nothing that points to the network.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from nanoinfer.bench.report.draw import INK, PALETTE, PAPER
from nanoinfer.bench.report.text import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PNG_DPI = 200
_FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_COLORS = {INK: "currentColor", PAPER: "var(--paper, #ffffff)"} | {
    light: f"var(--series-{i}, {light})" for i, (light, _) in enumerate(PALETTE)
}
_XML = '<?xml version="1.0" encoding="utf-8"?>\n'


@dataclass(frozen=True)
class Drawing:
    """One figure in the three forms that the report needs."""

    inline: str
    """An <svg> element for an HTML page that has `palette_css` in its style."""
    file: bytes
    """An SVG document of its own."""
    png: bytes
    """On white, for where no SVG goes."""


def palette_css(index: int) -> str:
    """Return the colours as CSS variables: of the light page (0) or the dark one (1)."""
    return " ".join(f"--series-{i}: {pair[index]};" for i, pair in enumerate(PALETTE))


def render(figure: Figure, name: str, title: str, description: str) -> Drawing:
    """Return a figure as SVG and PNG. Call inside `draw.drawing()`.

    Args:
        figure: as a function of `figures` made it.
        name: unique on the page; made of letters, digits and dashes.
        title: what it shows, in a few words.
        description: what can be seen in it.
    """
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    figure.savefig(png, format="png", dpi=PNG_DPI, facecolor="white")
    root = ElementTree.fromstring(svg.getvalue())  # matplotlib's own output: no entities, nothing from outside
    _plain(root, name)
    size = {key: root.attrib.pop(key) for key in ("width", "height")}
    root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt"}
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        element.text = clean(text)
        root.insert(place, element)
    inline = ElementTree.tostring(root, encoding="unicode")
    root.attrib |= {"xmlns": "http://www.w3.org/2000/svg", **size}
    style = ElementTree.Element("style")
    # Alone in a browser or in an <img> there is no page to take colours from.
    style.text = (
        f"svg {{ color: #1b1f24; background: #ffffff; --paper: #ffffff; {palette_css(0)} }} "
        "@media (prefers-color-scheme: dark) "
        f"{{ svg {{ color: #e4e7eb; background: #15181c; --paper: #15181c; {palette_css(1)} }} }}"
    )
    root.insert(2, style)
    file = (_XML + ElementTree.tostring(root, encoding="unicode") + "\n").encode()
    return Drawing(inline, file, png.getvalue())


def _plain(root: ElementTree.Element, name: str) -> None:
    """Rewrite matplotlib's elements in place: no namespaces, metadata or style sheet; our ids and colours."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        old = dict(element.attrib)
        element.attrib.clear()
        for key, value in old.items():
            key = key.rpartition("}")[2]
            if key == "id":
                value = f"{name}-{value}"
            elif key == "href":
                value = f"#{name}-{value.removeprefix('#')}"
            else:
                value = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", value)
                value = re.sub(r"#[0-9a-f]{6}\b", lambda m: _COLORS.get(m[0], m[0]), value)
                value = value.replace("'DejaVu Sans'", _FONTS)
            element.set(key, value)
