"""A run's specification and identity, and the records and files that it leaves."""
