"""Engine-side use of the KV cache: pinned prefixes, blocks from stores and other engines, KV events, views of blocks.

The engine, `startup`, `exporters` and the interfaces above may import this package.
"""
