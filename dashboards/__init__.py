"""The pages that operators look at: Streamlit over the HTTP API, and nothing but the HTTP API."""
