"""Colours by meaning, for light and dark: used by CSS, charts and Streamlit's own theme.

The colours of states are from Okabe and Ito (2008), readable with colour vision deficiencies. Each state also has a
shape: critical an outline, no data a hollow cell with a slash, simulated a cut corner.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Mode = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Palette:
    """One colour per meaning; `*_ink` is for text on it."""

    ok: str
    ok_ink: str
    watch: str
    watch_ink: str
    degraded: str
    degraded_ink: str
    critical: str
    critical_ink: str
    critical_line: str
    no_data: str
    drained: str
    simulated: str
    ink: str
    muted: str
    line: str
    surface: str
    ground: str
    accent: str
    button: str
    band: str
    median: str
    device: str


LIGHT = Palette(
    ok="#DCE5EC",
    ok_ink="#4A5A68",
    watch="#F0E442",
    watch_ink="#3D3A00",
    degraded="#E69F00",
    degraded_ink="#2E2000",
    critical="#D55E00",
    critical_ink="#1F0D00",
    critical_line="#1B1B1B",
    no_data="#7C8894",
    drained="#56B4E9",
    simulated="#7A4FB5",
    ink="#17212B",
    muted="#5A6874",
    line="#DDE3E9",
    surface="#F5F7F9",
    ground="#FFFFFF",
    accent="#0067A6",
    button="#0067A6",
    band="#9FB2C3",
    median="#5A6874",
    device="#D55E00",
)
# Dark is not inverted light: healthy cells would be too bright and hollow ones invisible.
DARK = Palette(
    ok="#2A3641",
    ok_ink="#9DADBA",
    watch="#D9CD3B",
    watch_ink="#262400",
    degraded="#E69F00",
    degraded_ink="#231800",
    critical="#E8590C",
    critical_ink="#1F0D00",
    critical_line="#FFE3D1",
    no_data="#75838F",
    drained="#2F7FB5",
    simulated="#B99AF0",
    ink="#E7EDF2",
    muted="#97A5B1",
    line="#2B3742",
    surface="#171F27",
    ground="#0F151B",
    accent="#56B4E9",
    button="#2272B4",
    band="#5C7387",
    median="#A9B7C3",
    device="#FF8A3D",
)
SERIES: tuple[tuple[str, str], ...] = (
    ("#0072B2", "#56B4E9"),
    ("#D55E00", "#FF8A3D"),
    ("#009E73", "#2FC79B"),
    ("#AA4499", "#E08AC8"),
    ("#8A6D00", "#D9CD3B"),
    ("#3B4CC0", "#9AA8FF"),
    ("#117733", "#8BD17C"),
    ("#882255", "#FF7FA6"),
)
"""Colours of several lines of one chart, light and dark. Source: Okabe and Ito (2008) and Tol (2021), made darker or
lighter until each has a contrast of 3:1 with the ground."""
PALETTES: dict[Mode, Palette] = {"light": LIGHT, "dark": DARK}


def css_variables(selector: str = ":root") -> str:
    """Returns `--fp-NAME` for every colour and `--fp-series-N` for lines; the browser chooses light or dark by the
    page's `color-scheme`.
    """
    dark = asdict(DARK)
    pairs = [f"--fp-{k.replace('_', '-')}:light-dark({v},{dark[k]});" for k, v in asdict(LIGHT).items()]
    pairs += [f"--fp-series-{i}:light-dark({light},{deep});" for i, (light, deep) in enumerate(SERIES)]
    return f"{selector}{{{''.join(pairs)}}}\n"


def page_css() -> str:
    """Returns the colours and the style sheet of all pages."""
    return css_variables() + (Path(__file__).parent / "page.css").read_text()


def streamlit_options() -> dict[str, str]:
    """Returns Streamlit's theme for both modes, as options of `streamlit run`."""
    options: dict[str, str] = {}
    for mode, palette in PALETTES.items():
        options |= {
            f"theme.{mode}.primaryColor": palette.button,
            f"theme.{mode}.backgroundColor": palette.ground,
            f"theme.{mode}.secondaryBackgroundColor": palette.surface,
            f"theme.{mode}.textColor": palette.ink,
            f"theme.{mode}.borderColor": palette.line,
            f"theme.{mode}.linkColor": palette.accent,
        }
    return options
