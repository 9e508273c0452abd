"""Requests in flight, their token counts and limits."""
