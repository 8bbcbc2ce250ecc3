"""How a step touches the world: processes, GPUs, files, stores and servers, one folder or module each."""
