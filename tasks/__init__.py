"""Access to the outside world: processes, GPUs, files, stores and servers, one folder or module each."""
