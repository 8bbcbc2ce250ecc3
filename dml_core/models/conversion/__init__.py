"""Conversion of weights published in other frameworks' formats to state dicts of this project's backbones. Commands:
docs/reference/backbones-and-datasets.md, Converted weights.
"""

from dml_core.extras import require

require("google.protobuf")
