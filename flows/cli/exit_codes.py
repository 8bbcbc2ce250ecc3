"""Exit codes of `dml`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | an error of this program: the line names the log file with the traceback; of `dml verify`: a row drifted, failed or vanished |
| 2 | a problem that the user can fix: the line says what, where and how |
| 129, 130, 143 | interrupted: closed terminal, Ctrl-C, SIGTERM |
| 141 | the reader of standard output has closed it, as `head` does |
"""

DONE, BUG, MENDABLE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
SUPERVISED_BUG = 70  # of a flow's process, so that its supervisor can distinguish it from a library's `sys.exit(1)`; the command's is 1
