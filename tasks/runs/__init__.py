"""What a run is: its specification, its identity, the records and files that it leaves."""
