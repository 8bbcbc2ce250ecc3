"""What readers share: the contract of a dataset, its rules, annotation files, archives, IDX files."""
