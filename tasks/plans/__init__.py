"""Plans of tables before they are run: requirements, progress, runs and estimated time."""
