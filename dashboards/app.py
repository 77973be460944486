"""The Streamlit script: page settings, style sheet, navigation. Started by `dashboards.serve`."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import identity, pages, theme
from dashboards.frame.component import draw_frame
from dashboards.views import login

ICON = Path(__file__).parent / "icon.png"  # a local file: Streamlit fetches named icons from the internet

st.set_page_config(page_title="Fleetpulse", layout="wide", page_icon=ICON)
st.html(f"<style>{theme.page_css()}</style>")
known = pages.make_pages()
who = identity.current()
if isinstance(who, identity.Stranger):
    # all pages stay known, so that the address of an alert's link survives the login
    st.navigation(list(known.values()), position="hidden")
    login.draw_login(who)
else:
    if identity.has_login():
        title, icon = f"{who.name} ({who.role})", ":material/account_circle:"
        known["account"] = st.Page(login.account_page, title=title, url_path="account", icon=icon)
    page = st.navigation(list(known.values()), position="top")
    asked = st.query_params
    st.set_page_config(page_title=pages.tab_title(page.title, asked.get_all("entity"), asked.get("id", "")))
    draw_frame()
    login.draw_banner(who)
    page.run()
