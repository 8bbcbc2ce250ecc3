"""HTTP service for a trained network and an optional index: `application` answers behind a `guard`, each `replica` computes."""
