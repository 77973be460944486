"""Charts of signals over one time axis, drawn on canvases by the browser."""
