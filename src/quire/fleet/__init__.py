"""Several servers behind one address: a proxy that routes by what their caches hold."""
