"""Generated images in any official layout."""
