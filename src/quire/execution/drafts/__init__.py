"""Draft models and MTP heads."""
