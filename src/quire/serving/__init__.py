"""Several servers behind one address: a proxy that routes by their caches, and the same on Ray Serve."""
