"""Several servers with one address: a proxy that routes by the contents of their caches."""
