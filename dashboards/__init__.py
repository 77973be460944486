"""The dashboard: Streamlit pages that use only the HTTP API."""
