"""One module per page, with layout only."""
