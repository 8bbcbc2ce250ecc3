"""Drawn images in any official layout."""
