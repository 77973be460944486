"""The fleet map as a picture, for reports, mail and wallboards: the same looks as on the page, in the light palette."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping

from PIL import Image, ImageColor, ImageDraw, ImageFont

from dashboards.answers import NODE_STATES
from dashboards.fleet_map.answers import AFFECTED, DRAINED, SIMULATED, FleetLayout, FleetMap
from dashboards.theme import LIGHT, Palette
from pipeline.model.entity_names import entity_name

WIDTH = 1600
"""Width of the picture (pixels). Chosen: A4 across at 140 dots per inch."""
SIZES = ((60, 36), (40, 26), (24, 18), (16, 12), (12, 9), (8, 7), (6, 6), (4, 4), (3, 3), (2, 2))
"""Width and height of a cell; the first with which the map fits is used."""
TALLEST = 700
"""Height up to which a larger cell is used (pixels). Chosen: a third of A4. Dots of the smallest size may be taller."""
HEAD, MARGIN = 18, 10
NAMED = 7
"""Least height of a cell whose group has a name above it."""
NODE_NAMED = 40
"""Least width of a cell that has the name of its node in it. Chosen: six characters of the smallest readable size."""
_STATE = 7
_CIVIDIS = (
    "#00224e",
    "#123570",
    "#3b496c",
    "#575d6d",
    "#707173",
    "#8a8678",
    "#a59c74",
    "#c3b369",
    "#e1cc55",
    "#fee838",
)
"""Nunez, Anderton, Renslow (2018); as in paint.js."""
_UNKNOWN, _TOP = 255, 250


def draw_picture(found: FleetMap, layout: FleetLayout, title: str, caption: str, palette: Palette = LIGHT) -> bytes:
    """Returns the map as PNG with title, caption and legend."""
    boxes, (wide, tall), height = _place(layout)
    picture = Image.new("RGB", (WIDTH, height + 110), palette.ground)
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, 8), title, fill=palette.ink, font=_font(22))
    pen.text((MARGIN, 40), caption, fill=palette.muted, font=_font(15))
    looks, levels = base64.b64decode(found.looks), base64.b64decode(found.levels) if found.levels else b""
    fills = _fills(found, palette)
    for entity, x, y, columns, first, count in boxes:
        top = y + 70
        if tall >= NAMED:
            name = (entity_name(entity).partition(" ")[2] or entity_name(entity)) if entity else f"no {found.by}"
            mark = "▲ " if entity in found.causes else ""
            pen.text(
                (x, top - HEAD + 2),
                mark + name[: max(3, columns * (wide + 1) // 8)],
                fill=palette.muted,
                font=_font(12),
            )
        for k in range(count):
            left, up = x + (k % columns) * (wide + 1), top + (k // columns) * (tall + 1)
            level = levels[first + k] if levels else None
            ground = _draw_cell(pen, (left, up, wide, tall), looks[first + k], level, fills, palette)
            if wide >= NODE_NAMED:
                _draw_name(pen, (left, up, wide, tall), layout.names[first + k], ground)
    _draw_legend(pen, height + 80, palette)
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return out.getvalue()


Box = tuple[str, int, int, int, int, int]
"""A group: entity, x, y, columns, first cell, number of cells."""


def _place(layout: FleetLayout) -> tuple[list[Box], tuple[int, int], int]:
    for size in SIZES:
        boxes, height = _flow(layout, size)
        if height <= TALLEST:
            break
    return boxes, size, height


def _flow(layout: FleetLayout, size: tuple[int, int]) -> tuple[list[Box], int]:
    wide, tall = size
    head = HEAD if tall >= NAMED else 0
    gap = 10 if wide > 6 else 5
    boxes: list[Box] = []
    x, y, tallest, first = MARGIN, head, 0, 0
    for entity, count in layout.groups:
        columns = 4 if count <= 32 else 8 if count <= 64 else math.ceil(math.sqrt(count * 3))
        columns = max(1, min(columns, count, (WIDTH - 2 * MARGIN) // (wide + 1)))
        box_width, box_height = columns * (wide + 1), math.ceil(count / columns) * (tall + 1)
        if x > MARGIN and x + box_width > WIDTH - MARGIN:
            x, y, tallest = MARGIN, y + tallest + gap + head, 0
        boxes.append((entity, x, y, columns, first, count))
        x, tallest, first = x + box_width + gap, max(tallest, box_height), first + count
    return boxes, y + tallest


def _fills(found: FleetMap, palette: Palette) -> list[tuple[int, ...]]:
    """Returns the colours of levels 0 to 250."""
    if found.scale is None:
        return []
    names = ("#0072b2", "#7fb8d8", palette.ok, "#f0b860", "#d55e00") if found.scale["diverging"] else _CIVIDIS
    stops = [ImageColor.getrgb(name)[:3] for name in names]
    colours = []
    for level in range(_TOP + 1):
        at = level / _TOP * (len(stops) - 1)
        low = min(int(at), len(stops) - 2)
        mixed = zip(stops[low], stops[low + 1], strict=True)
        colours.append(tuple(round(a + (b - a) * (at - low)) for a, b in mixed))
    return colours


def _draw_cell(
    pen: ImageDraw.ImageDraw,
    place: tuple[int, int, int, int],
    look: int,
    level: int | None,
    fills: list[tuple[int, ...]],
    palette: Palette,
) -> tuple[int, ...]:
    """Returns the colour below the middle of the cell, for its name."""
    x, y, wide, tall = place
    edge = (x, y, x + wide - 1, y + tall - 1)
    state = NODE_STATES[min(look & _STATE, len(NODE_STATES) - 1)]
    colour = _state_colours(palette)
    ground: str | tuple[int, ...]
    if state == "no_data" or level == _UNKNOWN:
        ground = palette.ground
        pen.rectangle(edge, outline=palette.no_data, fill=ground)
        if tall >= 5:
            pen.line((x, y + tall - 1, x + wide - 1, y), fill=palette.no_data)
    elif level is not None:
        ground = fills[level]
        pen.rectangle(edge, fill=ground)
    elif look & AFFECTED:
        ground = palette.ok
        pen.rectangle(edge, fill=ground)
        pen.rectangle((x, y + tall - max(1, round(tall * 0.4)), x + wide - 1, y + tall - 1), fill=colour[state])
    else:
        ground = palette.drained if look & DRAINED and state == "ok" else colour[state]
        pen.rectangle(edge, fill=ground)
    if look & DRAINED and tall >= 5:
        pen.line((x + wide // 3, y + tall - 1, x + 2 * wide // 3, y), fill=palette.ink)
    if look & SIMULATED and tall >= 7:
        cut = tall // 3
        pen.polygon([(x + wide - 1 - cut, y), (x + wide - 1, y), (x + wide - 1, y + cut)], fill=palette.simulated)
    if state == "critical" and not look & AFFECTED:
        pen.rectangle(edge, outline=palette.critical_line, width=2 if tall > 9 else 1)
    return ImageColor.getrgb(ground) if isinstance(ground, str) else ground


def _draw_name(pen: ImageDraw.ImageDraw, place: tuple[int, int, int, int], node: str, ground: tuple[int, ...]) -> None:
    """Draws the name of a node into its cell; a long one without its domain, then only its end: there names differ."""
    x, y, wide, tall = place
    name, font = node.partition(":")[2], _font(11)
    if pen.textlength(name, font=font) > wide - 4:
        name = name.partition(".")[0]
    while name and pen.textlength(name, font=font) > wide - 4:
        name = name[1:]
    red, green, blue = ground[:3]
    ink = "#17212b" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
    middle = (x + wide // 2, y + round(tall * 0.35))
    half = round(pen.textlength(name, font=font)) // 2 + 2
    pen.rectangle((middle[0] - half, middle[1] - 6, middle[0] + half, middle[1] + 6), fill=ground)
    pen.text(middle, name, fill=ink, font=font, anchor="mm")


def _state_colours(palette: Palette) -> Mapping[str, str]:
    return {
        "ok": palette.ok,
        "watch": palette.watch,
        "degraded": palette.degraded,
        "critical": palette.critical,
        "no_data": palette.ground,
    }


def _draw_legend(pen: ImageDraw.ImageDraw, y: int, palette: Palette) -> None:
    faults = (("critical", 3), ("degraded", 2), ("watch", 1), ("affected", 3 | AFFECTED))
    shown = (*faults, ("drained", DRAINED), ("no data", 4), ("ok", 0))
    x = MARGIN
    for word, look in (*shown, ("simulated", SIMULATED)):
        _draw_cell(pen, (x, y, 20, 15), look, None, [], palette)
        pen.text((x + 26, y - 2), word, fill=palette.muted, font=_font(15))
        x += 45 + int(pen.textlength(word, font=_font(15)))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Returns DejaVu, which has most scripts, where it is installed, else the font that Pillow brings."""
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)
