"""Chats and live tables in the terminal."""
