"""The losses, one per file; `registry.build_loss` builds one from its name and options."""
