# /// script
# requires-python = ">=3.10"
# dependencies = ["tensorflow-cpu>=2.16", "numpy"]
# ///
"""Write a TensorFlow checkpoint's variables as a NumPy archive. It runs in its own environment, as only it needs TensorFlow.

uv run dml_core/models/conversion/read_slim_checkpoint.py inception_v1.ckpt inception_v1.npz
"""

import sys
from pathlib import Path


def main() -> int:
    """Convert one checkpoint. Return 0, or 2 after a short error message on standard error."""
    if len(sys.argv) != 3:
        print(f"usage: {Path(sys.argv[0]).name} CHECKPOINT OUT.npz", file=sys.stderr)
        return 2
    checkpoint, out = Path(sys.argv[1]), Path(sys.argv[2])
    if out.suffix != ".npz" or out.exists():
        print(f"error: {out} must be a new file whose name ends in .npz", file=sys.stderr)
        return 2

    import numpy as np
    import tensorflow as tf

    try:
        reader = tf.train.load_checkpoint(str(checkpoint))
        variables = {name: reader.get_tensor(name) for name in sorted(reader.get_variable_to_shape_map())}
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"error: {checkpoint} is not a checkpoint of TensorFlow, or it is damaged ({reason})", file=sys.stderr)
        return 2
    np.savez(out, **variables)
    print(f"{out}: {len(variables)} variables")
    return 0


if __name__ == "__main__":
    sys.exit(main())
