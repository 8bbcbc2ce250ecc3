"""Searchable index of many images' embeddings: built in a memory-mapped folder, extended and reduced. Start with `index.py`."""

from dml_core.extras import require

require("faiss")
