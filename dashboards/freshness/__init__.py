"""The age of the data on a page, counted by the browser even if the server stops."""
