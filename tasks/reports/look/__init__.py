"""Static pages to browse runs: one for each run, one for a comparison; they need no server and no network."""
