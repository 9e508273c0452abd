"""The proxy of `quire route`: one address before several servers."""
