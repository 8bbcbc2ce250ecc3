"""Embeddings of many images to be searched: built, kept in a memory-mapped folder, added to and taken from. Begins at `index.py`."""
