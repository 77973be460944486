"""The Streamlit script: page settings, style sheet, navigation. Started by `dashboards.serve`."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import pages, routes, theme
from dashboards.frame.component import draw_frame

ICON = Path(__file__).parent / "icon.png"  # a local file: Streamlit fetches named icons from the internet

st.set_page_config(page_title="Fleetpulse", layout="wide", page_icon=ICON)
st.html(f"<style>{theme.page_css()}</style>")
known = pages.make_pages()
routes.register_pages(known)
page = st.navigation(list(known.values()), position="top")
draw_frame()
page.run()
