"""The linear classifier of a finished run, and its gradient with respect to an embedding (heated-up softmax, eq. 1 to 3).

Shapes: N samples, D embedding dimensions, C classes.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor
from torch.nn import functional

from dml_core.errors import EvaluationError
from dml_core.losses.heated_up_softmax import HeatedUpSoftmax
from dml_core.losses.sgsl import SGSL
from dml_core.losses.softmax import Softmax
from dml_core.measurements.contract import FinishedRun

Floats = NDArray[np.float64]
Samples = Literal["hard", "easy"]
QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Classifier:
    """Linear classifier with logits z = W f + b; heated-up softmax trains alpha z.

    Attributes:
        weight: W, (C, D), with rows of unit length if the loss uses them so.
        bias: b, (C,); zeros if the loss has none. A bias that is added to alpha W f is divided by the alpha of the weights' epoch.
    """

    weight: Floats
    bias: Floats

    @property
    def directions(self) -> Floats:
        """(C, D), W with rows of unit length."""
        return unit_rows(self.weight)

    def margins(self, embeddings_ND: Floats, labels_N: NDArray[np.int64]) -> Floats:
        """Return (N,) the own class's logit minus the largest other logit: positive if the classifier is right."""
        logits_NC = embeddings_ND @ self.weight.T + self.bias
        rows = np.arange(len(labels_N))
        own_N = logits_NC[rows, labels_N]
        logits_NC[rows, labels_N] = -np.inf
        return own_N - logits_NC.max(axis=1)

    def gradient_norms(self, embeddings_ND: Floats, labels_N: NDArray[np.int64], alpha: float) -> Floats:
        """Return (N,) the norm of eq. 3, alpha sum_m (p(m | x, alpha) - q(m | x)) w_m, with p of eq. 1: the softmax of alpha z."""
        error_NC = softmax(alpha * (embeddings_ND @ self.weight.T + self.bias), axis=1)
        error_NC[np.arange(len(labels_N)), labels_N] -= 1
        return np.linalg.norm(alpha * error_NC @ self.weight, axis=1)


def classifier_of(run: FinishedRun) -> Classifier:
    """Return the classifier trained by the run's loss.

    Raises:
        EvaluationError: the loss is none of these, or the scored classes are not the trained ones.
    """
    loss = run.system.loss
    if isinstance(loss, HeatedUpSoftmax):
        bias_C: Tensor | None = loss.classifier.bias
        if bias_C is not None and not loss.config.bias_inside_alpha:
            bias_C = bias_C / loss.alpha
        classifier = _classifier(functional.normalize(loss.classifier.weight), bias_C)
    elif isinstance(loss, Softmax):
        classifier = _classifier(loss.classifier.weight, loss.classifier.bias)
    elif isinstance(loss, SGSL):
        classifier = _classifier(loss.weight_CD, None)
    else:
        known = "softmax, heated_up_softmax and sgsl"
        raise EvaluationError(f"{run.title}: measurements of a classifier support the losses {known}, not '{run.training.loss.name}'")
    scored = run.gallery.dataset  # each role numbers its classes from 0
    if run.gallery.role != "train" and scored.class_names != run.training_set.class_names:
        raise EvaluationError(f"{run.title}: scored images have classes that the classifier was not trained on; score the training images")
    return classifier


def choose_samples(margins_N: Floats, samples: Samples) -> NDArray[np.int64]:
    """Return indices of three hard samples (margin at most 0: misclassified) or three easy ones (section 3.1).

    The samples are the 0.1, 0.5 and 0.9 quantiles of the hard or easy samples' margins; fewer if there are fewer than three.
    """
    of_kind = np.flatnonzero((margins_N > 0) == (samples == "easy"))
    ordered = of_kind[np.argsort(margins_N[of_kind], kind="stable")]
    places = sorted({int(quantile * len(ordered)) for quantile in QUANTILES}) if len(ordered) else []
    return ordered[places]


def unit_rows(rows_ND: NDArray[Any]) -> Floats:
    """Return each row divided by its norm, in float64.

    Raises:
        EvaluationError: a row of zeros, which has no direction.
    """
    wide_ND = rows_ND.astype(np.float64)
    norms_N1 = np.linalg.norm(wide_ND, axis=1, keepdims=True)
    if not norms_N1.all():
        raise EvaluationError(f"{int((norms_N1 == 0).sum())} rows of zeros have no direction; repair the network")
    return wide_ND / norms_N1


def _classifier(weight_CD: Tensor, bias_C: Tensor | None) -> Classifier:
    weight = weight_CD.detach().numpy().astype(np.float64)
    return Classifier(weight, np.zeros(len(weight)) if bias_C is None else bias_C.detach().numpy().astype(np.float64))
