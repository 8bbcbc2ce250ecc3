"""Common parts of the readers: dataset contract, rules, annotation files, archives, IDX files."""
