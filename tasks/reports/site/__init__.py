"""Static pages of the papers' tables: one self-contained file per table, and an index; they open from disk, without a network."""
