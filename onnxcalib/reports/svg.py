"""Figures as files and as SVG for a page: colours that follow the page's theme, and tooltips."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxcalib.names import printable
from onnxcalib.reports.plots import pyplot

INK, MUTED, RULE, BAND = "#1f2328", "#656d77", "#d1d5da", "#dbe9f4"
FIRST, SECOND, THIRD = "#0b6e99", "#c4622d", "#7a5ea8"
# On the page these become variables of its style sheet, which knows light and dark.
VARIABLES = {
    INK: "--ink", MUTED: "--muted", RULE: "--rule", BAND: "--band",
    FIRST: "--first", SECOND: "--second", THIRD: "--third",
}  # fmt: skip
# Told apart on white and on black; warm colours for few bits.
BIT_COLOURS = {
    2: "#b5314c", 3: "#d05a3c", 4: "#d98324", 5: "#b99a1f", 6: "#76a043", 7: "#2f9a84", 8: "#3b82c4", 16: "#7f78b8",
}  # fmt: skip
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
WIDTH = 9.2  # inches
SVG_DPI, PNG_DPI = 72, 120


@dataclass
class Drawing:
    """A figure under construction; whatever it tips is explained where the mouse rests."""

    name: str
    caption: str
    figure: Any
    tips: dict[str, str] = field(default_factory=dict)
    dots: dict[str, Sequence[str]] = field(default_factory=dict)

    def tip(self, artist: Any, text: str) -> None:
        """Gives a shape a tooltip."""
        key = f"tip{len(self.tips)}"
        artist.set_gid(key)
        self.tips[key] = text

    def tip_dots(self, line: Any, texts: Sequence[str]) -> None:
        """Gives each marker of a line a tooltip; lines of one marker each would take many times as long to draw."""
        key = f"dots{len(self.dots)}"
        line.set_gid(key)
        self.dots[key] = texts


@dataclass(frozen=True)
class Picture:
    """A finished figure: for the page, and as files of their own."""

    name: str
    caption: str
    inline: str
    svg: str
    png: bytes


def drawing(name: str, caption: str, height: float, *grid: int, **settings: Any) -> tuple[Drawing, Any]:
    """An empty figure of the page's width, and its axes: one, or a grid of rows and columns."""
    figure, axes = pyplot().subplots(*grid, figsize=(WIDTH, height), layout="constrained", **settings)
    return Drawing(name, caption, figure), axes


def finish(drawn: Drawing) -> Picture:
    """Writes the figure out and lets go of it."""
    plt = pyplot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    with plt.rc_context({**STYLE, "svg.hashsalt": drawn.name}):
        text, image = io.StringIO(), io.BytesIO()
        # Not by savefig, which draws all of it once more for each file before it writes that.
        _laid_out(drawn.figure, FigureCanvasSVG).print_svg(text, metadata={"Date": None, "Creator": None})
        drawn.figure.set_dpi(PNG_DPI)
        FigureCanvasAgg(drawn.figure).print_png(image)
        plt.close(drawn.figure)
    svg = _with_tips(text.getvalue(), drawn.tips, drawn.dots)
    return Picture(drawn.name, drawn.caption, _inlined(svg, drawn.name, drawn.caption), svg, image.getvalue())


def _laid_out(figure: Any, canvas: Callable[[Any], Any]) -> Any:
    """The canvas of a figure that is laid out once, for all files that are made of it."""
    figure.set_dpi(SVG_DPI)
    made = canvas(figure)
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")
    return made


def _with_tips(svg: str, tips: Mapping[str, str], dots: Mapping[str, Sequence[str]]) -> str:
    def title(text: str) -> str:
        return f"<title>{html.escape(printable(text))}</title>"

    def explained(match: re.Match[str]) -> str:
        return f"{match.group(0)}{title(tips[match.group(1)])}"

    def each_explained(match: re.Match[str]) -> str:
        texts = iter(dots[match.group(1)])
        return re.sub(r"(<use [^>]*)/>", lambda use: f"{use.group(1)}>{title(next(texts))}</use>", match.group(0))

    svg = re.sub(r'<g id="(tip\d+)">', explained, svg)
    return re.sub(r'<g id="(dots\d+)">.*?</g>', each_explained, svg, flags=re.DOTALL)


def _inlined(svg: str, name: str, caption: str) -> str:
    """The drawing alone, with names of its own and colours of the page."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r' xmlns(:\w+)?="[^"]*"', "", body)
    body = re.sub(r'id="', f'id="{name}-', body)
    body = re.sub(r'(url\(#|xlink:href="#)', rf"\g<1>{name}-", body)
    # The page behind it is the background.
    body = re.sub(r'(<g id="\w+-patch_1">\s*<path d="[^"]*"\s*style=")fill: #ffffff', r"\1fill: none", body)
    body = body.replace("fill: #ffffff", "fill: var(--paper)").replace("stroke: #ffffff", "stroke: var(--paper)")
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    head = rf'<svg viewBox="\1" role="img" aria-label="{html.escape(caption)}">'
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', head, body, count=1)
