"""Readers of the publishers' archives and the user's own folders: one file per dataset; common parts are in `shared`."""
