"""JSON schemas in a normal form that grammars are written from; the standard library only.

Reading order: normal.
"""
