"""Settings that no paper states are marked "assumed" in the files: on their line, or in the comment block directly above."""

import re

import pytest

from tasks.runs.protocols import TABLES

# Settings left open by the papers' texts (shared/PROTOCOLS.md, section 8), each by the beginning of its line in the protocol.
NOT_STATED = {
    "softtriple": ["pooling:", "head:", "scale: 20", "cub200:", "cars196:", "transform: {test_resize: 256", "optimiser: {weight_decay: 0"],
    "heated_up_softmax": [
        "head: {kind: bn", "batchnorm_momentum:", "initial: unit_norm", "interpolation: lanczos", "heat_from: 0.7625", "mnist: &digits",
        "transform: {train_resize: null", "optimiser: {weight_decay: 0, eps: 1e-8}", "evaluation:",
    ],
    "discriminative": [
        "evaluation:", "head:", "freeze_batchnorm:", "loss:", "sampler:", "transform:", "name: sgd", "momentum:", "learning_rate: 0.1",
        "num_epochs: 40", "model: {backbone: {name: googlenet",
    ],
    "tuplet_margin": ["pooling:", "head:", "freeze_batchnorm:", "options:", "sampler:", "transform: {train_resize", "num_epochs:",
                      "prints:"],
    "sgsl": [
        "head: {kind: bn_neck", "loss:", "sampler:", "crop: random_resized", "jitter_first:", "flip:", "optimiser: {name: sgd", "datasets:",
        "pooling: {learn_gem_power", "freeze_batchnorm: statistics", "loss: {options: {dropout", "transform: {interpolation: bilinear",
        "optimiser: {without_decay: one", "schedule: {kind: cosine, warmup_steps", "cub200: {optimiser",
    ],
}  # fmt: skip
SAID_BEFORE = {("heated_up_softmax", "evaluation:"): "scikit-learn's defaults of the time"}  # released, not assumed


def marked(lines: list[str], place: int) -> bool:
    """Return whether the line's comment, or the comment block directly above, contains "assumed"."""
    above = []
    for line in reversed(lines[:place]):
        if not line.strip().startswith("#"):
            break
        above.append(line)
    return "assumed" in lines[place].partition("#")[2] or any("assumed" in line for line in above)


@pytest.mark.parametrize("paper", NOT_STATED)
def test_what_no_paper_states_says_so(paper: str) -> None:
    lines = (TABLES / paper / "protocol.yaml").read_text(encoding="utf-8").splitlines()
    for setting in NOT_STATED[paper]:
        places = [place for place, line in enumerate(lines) if line.strip().startswith(setting)]
        assert places, f"{paper}: no setting begins with '{setting}'"
        said = SAID_BEFORE.get((paper, setting))
        assert (said in lines[places[0]]) if said else marked(lines, places[0]), f"{paper}: '{setting}' has no mark"


@pytest.mark.parametrize("paper", sorted(NOT_STATED))
def test_no_text_has_a_figure_that_no_paper_prints(paper: str) -> None:
    """Section 4.1 of SoftTriple says "significantly"; logs of Cars196 end at eight numbers, none of which is 94.3."""
    for path in [*(TABLES / paper).glob("*.yaml"), TABLES / "project" / "claims.yaml"]:
        assert not re.search(r"about 10 (stay|on)|94\.3 to 95\.0|span 0\.7", path.read_text(encoding="utf-8")), path
