"""The script that Streamlit runs: page settings, style sheet, navigation. Started by `dashboards.serve`."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import routes, theme

ICON = Path(__file__).parent / "icon.png"  # a file: a named icon would be fetched from the internet

st.set_page_config(page_title="Fleetpulse", layout="wide", page_icon=ICON)
st.html(f"<style>{theme.page_css()}</style>")
st.navigation([routes.fleet_page(), routes.incidents_page(), routes.incident_page()], position="top").run()
