"""Routes for operators and for the page."""
