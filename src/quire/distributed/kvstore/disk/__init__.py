"""The block store on disk."""
