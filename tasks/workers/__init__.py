"""Ray and the code of its workers; no other package uses Ray."""
