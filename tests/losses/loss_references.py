"""Slow references: each loss written a second time from its paper's equation, in plain Python over lists of floats.

A reference takes the loss (for its options and centres only), the embeddings and the labels, and returns the total.
"""

from math import exp, log, sqrt

import torch


def dot(u, v):
    return sum(a * b for a, b in zip(u, v, strict=True))


def norm(u):
    return sqrt(dot(u, u))


def unit(u):
    return [a / max(norm(u), 1e-12) for a in u]


def cosine(u, v):
    return dot(unit(u), unit(v))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def cross_entropy(logits, target):
    """Minus sum_m target_m log softmax_m(logits)."""
    log_sum = log(sum(exp(z) for z in logits))
    return -sum(q * (z - log_sum) for q, z in zip(target, logits, strict=True))


def one_hot(label, num_classes, smoothing=0.0):
    return [(1 - smoothing) * (c == label) + smoothing / num_classes for c in range(num_classes)]


def softmax(loss, embeddings, labels):
    weights = loss.classifier.weight.tolist()
    biases = loss.classifier.bias.tolist() if loss.config.bias else [0.0] * len(weights)
    terms = []
    for x, y in zip(embeddings, labels, strict=True):
        logits = [dot(w, x) + b for w, b in zip(weights, biases, strict=True)]
        terms.append(cross_entropy(logits, one_hot(y, len(weights), loss.config.label_smoothing)))
    return mean(terms)


def normalised_softmax(loss, embeddings, labels):
    centres = loss.centres_CD.tolist()
    terms = []
    for x, y in zip(embeddings, labels, strict=True):
        exponentials = [exp(loss.config.scale * cosine(w, x)) for w in centres]
        terms.append(-log(exponentials[y] / sum(exponentials)))
    return mean(terms)


def multi_centre(loss, embeddings, labels, similarity):
    """Eq. 6 and 8 with the given similarity to a class, plus eq. 9 and 10 with the released code's 1e-5 under the root."""
    classes, scale, margin = loss.centres_CKD.tolist(), loss.config.scale, loss.config.margin
    terms = []
    for x, y in zip(embeddings, labels, strict=True):
        similarities = [similarity([cosine(x, w) for w in centres]) for centres in classes]
        own = exp(scale * (similarities[y] - margin))
        others = sum(exp(scale * s) for c, s in enumerate(similarities) if c != y)
        terms.append(-log(own / (own + others)))
    num_classes, num_centres = len(classes), len(classes[0])
    spread = 0.0
    for centres in classes:
        for t in range(num_centres):
            for s in range(t + 1, num_centres):
                spread += sqrt(2 - 2 * cosine(centres[s], centres[t]) + 1e-5)
    divisor = num_classes * num_centres * (num_centres - 1)
    return mean(terms) + (loss.config.regulariser_weight * spread / divisor if divisor else 0.0)


def softtriple(loss, embeddings, labels):
    def soft(cosines):
        weights = [exp(s / loss.config.gamma) for s in cosines]
        return sum(w * s for w, s in zip(weights, cosines, strict=True)) / sum(weights)

    return multi_centre(loss, embeddings, labels, soft)


def hardtriple(loss, embeddings, labels):
    return multi_centre(loss, embeddings, labels, max)


def reference(name, loss, embeddings_ND, labels_N):
    """The named reference's total as a float64 tensor."""
    return torch.tensor(REFERENCES[name](loss, embeddings_ND.tolist(), labels_N.tolist()), dtype=torch.float64)


REFERENCES = {
    "softmax": softmax,
    "normalised_softmax": normalised_softmax,
    "softtriple": softtriple,
    "hardtriple": hardtriple,
}
