"""How old what you see is, counted on by the browser even when the server falls silent."""
