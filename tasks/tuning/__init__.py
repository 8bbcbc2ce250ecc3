"""Search the settings of a row (`dml tune`): search space, training images, order of the trials, result."""
