"""Retrieval: exact and approximate search, ranks, and the metrics computed from them."""

from dml_core.extras import require

require("faiss")
