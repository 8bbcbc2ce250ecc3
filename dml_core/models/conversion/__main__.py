"""Convert published weights: `python -m dml_core.models.conversion slim|caffe|timm FILE OUT`."""

import argparse
import sys
from pathlib import Path

import torch

from dml_core.errors import ConfigError, DmlError, first_line
from dml_core.files import writing
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.registry import build_backbone
from dml_core.models.backbones.weights import StateDict, check_fit
from dml_core.models.conversion.caffe import read_caffemodel, state_dict_from_caffe
from dml_core.models.conversion.renamed import read_tensors, renamed, timm_state
from dml_core.models.conversion.slim import read_arrays, state_dict_from_slim

BACKBONES = {"slim": "inception_v1", "caffe": "googlenet_caffe"}
TIMM = "timm"


def main() -> int:
    """Convert one file. Return 0, or 2 after a short error message on standard error."""
    parser = argparse.ArgumentParser(prog="python -m dml_core.models.conversion", description=__doc__)
    kinds = "slim: what read_slim_checkpoint.py wrote; caffe: bvlc_googlenet.caffemodel; timm: a timm model's tensors under other names"
    parser.add_argument("kind", choices=[*BACKBONES, TIMM], help=kinds)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path, help="a new file, the state dict saved by torch")
    parser.add_argument("--backbone", help="for timm: the model, as timm:tf_efficientnet_lite0")
    args = parser.parse_args()
    if (args.kind == TIMM) != (args.backbone is not None):
        parser.error("timm needs --backbone, and no other kind reads it")
    try:
        convert(args.kind, args.file, args.out, args.backbone)
    except DmlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def convert(kind: str, file: Path, out: Path, backbone: str | None = None) -> None:
    """Write the state dict of a published file.

    Args:
        kind: "slim", "caffe" or "timm".
        file: file to convert.
        out: output file; an existing one is not overwritten.
        backbone: for "timm", the model.

    Raises:
        ConfigError: the file is not the published one, or `out` cannot be written.
    """
    state = _converted(kind, file, backbone)
    if out.exists():
        raise ConfigError(f"{out} exists: remove it, or choose another place")
    try:
        with writing(out) as opened:
            torch.save(state, opened)
    except (OSError, RuntimeError) as error:  # torch hides the error of a write behind its own
        raise ConfigError(f"{out} cannot be written ({getattr(error, 'strerror', None) or first_line(error)})") from None
    print(f"{out}: {len(state)} tensors, {sum(tensor.numel() for tensor in state.values())} numbers")


def _converted(kind: str, file: Path, backbone: str | None) -> StateDict:
    if kind == TIMM:
        assert backbone is not None
        return renamed(read_tensors(file), timm_state(backbone), str(file))
    with torch.device("meta"):
        own = build_backbone(BackboneConfig(name=BACKBONES[kind])).state_dict()
    state = state_dict_from_slim(read_arrays(file), own) if kind == "slim" else state_dict_from_caffe(read_caffemodel(file), own)
    check_fit(own, state, str(file))
    return state


if __name__ == "__main__":
    sys.exit(main())
