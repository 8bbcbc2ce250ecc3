"""How a step touches the world: processes, GPUs, files, stores and servers, one module each."""
