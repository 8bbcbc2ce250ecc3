"""The objectives, one file each; `registry.build_loss` makes one from its name and options."""
