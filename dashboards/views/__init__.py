"""One module per page, with layout only: what is shown comes from the API, how it looks from markup and charts."""
