"""Static pages of the papers' tables: one self-contained file a table, and an index; they open from the file system, without a network."""
