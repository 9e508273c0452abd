"""Routing: which replica gets a request, by what their caches hold and how much they have to do. No I/O, no clock."""
