"""The page: its files, and the page in a real browser."""
