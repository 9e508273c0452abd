"""Engine-side use of the KV cache: pinned prefixes, and blocks prefetched from disk.

The engine, `startup`, `exporters` and the interfaces above may import this package.
"""
