"""Distributed execution: who carries plans to workers."""
