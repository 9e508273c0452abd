"""JSON schemas in a normal form, from which grammars are written; uses the standard library only.

Reading order: normal.
"""
