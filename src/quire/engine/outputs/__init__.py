"""Conversion of a step's tokens to `RequestOutput`: texts, stop strings, log probabilities, best of n, beams, tool
calls, and early ends.

Reading order: outputs, output_processor, text. The engine and the interfaces above it may import this package.
"""
