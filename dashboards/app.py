"""The Streamlit script: page settings, style sheet, navigation. Started by `dashboards.serve`."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import routes, theme
from dashboards.views import detectors, fleet, incident, incidents

ICON = Path(__file__).parent / "icon.png"  # a local file: Streamlit fetches named icons from the internet

st.set_page_config(page_title="Fleetpulse", layout="wide", page_icon=ICON)
st.html(f"<style>{theme.page_css()}</style>")
pages = {
    "fleet": st.Page(fleet.page, title="Fleet", url_path="fleet", icon=":material/grid_view:", default=True),
    "incidents": st.Page(incidents.page, title="Incidents", url_path="incidents", icon=":material/notifications:"),
    "detectors": st.Page(detectors.page, title="Detectors", url_path="detectors", icon=":material/troubleshoot:"),
    "incident": st.Page(incident.page, title="Incident", url_path="incident", visibility="hidden"),
}
routes.register_pages(pages)
st.navigation(list(pages.values()), position="top").run()
