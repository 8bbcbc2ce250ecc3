"""Pages for a person who looks rather than reads: one for each run, one for a comparison; static files, no server, no network."""
