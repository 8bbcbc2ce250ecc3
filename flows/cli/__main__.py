"""`python -m flows.cli` is `dml`."""

from flows.cli import main

main()
