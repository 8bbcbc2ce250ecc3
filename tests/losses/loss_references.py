"""Slow references: each loss reimplemented from its paper's equation, in plain Python with lists of floats.

A reference takes the loss (for its options and centres only), the embeddings and the labels, and returns the total.
"""

from math import atan2, cos, exp, log, sqrt

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
    classes, scale, margin = loss.centres_KCD.transpose(0, 1).tolist(), loss.config.scale, loss.config.margin
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


def distance(u, v):
    return norm([a - b for a, b in zip(u, v, strict=True)])


def angle(u, v):
    """Return the angle between 0 and pi, also accurate for equal and opposite vectors (Kahan)."""
    u, v = unit(u), unit(v)
    return 2 * atan2(distance(u, v), norm([a + b for a, b in zip(u, v, strict=True)]))


def softplus(a):
    return a + log(1 + exp(-a)) if a > 0 else log(1 + exp(a))


def relu(a):
    return max(a, 0.0)


def pairs(labels, same):
    """Return ordered pairs of two different samples, of the same class or of different ones."""
    everyone = range(len(labels))
    return [(i, j) for i in everyone for j in everyone if i != j and (labels[i] == labels[j]) == same]


def negatives(labels, anchor):
    return [n for n in range(len(labels)) if labels[n] != labels[anchor]]


def heated_up_softmax(loss, embeddings, labels):
    weights = [unit(w) for w in loss.classifier.weight.tolist()]
    biases = loss.classifier.bias.tolist() if loss.config.bias else [0.0] * len(weights)
    terms = []
    for x, y in zip(embeddings, labels, strict=True):
        factor = loss.alpha if loss.config.bias_inside_alpha else 1.0
        logits = [loss.alpha * dot(w, x) + factor * b for w, b in zip(weights, biases, strict=True)]
        terms.append(cross_entropy(logits, one_hot(y, len(weights))))
    return mean(terms)


def discriminative(loss, embeddings, labels):
    num_classes = loss.num_classes
    one_hots = [one_hot(c, num_classes) for c in range(num_classes)]
    centroids = one_hots if loss.config.centroids == "one_hot" else loss.centroids_CD.tolist()
    terms = []
    for x, y in zip(embeddings, labels, strict=True):
        others = sum(distance(x, centroids[m]) for m in range(num_classes) if m != y)
        terms.append(distance(x, centroids[y]) - others / (3 * (num_classes - 1)))
    return mean(terms)


def tuplet_margin(loss, embeddings, labels):
    """Eq. 13 with every negative, or with the negatives that the loss drew; eq. 15 to 17."""
    config = loss.config
    positive, negative = pairs(labels, True), pairs(labels, False)
    if not positive or not negative:
        return 0.0
    drawn = drawn_negatives(labels, positive)
    terms = []
    for p, (a, b) in enumerate(positive):
        near = config.scale * cos(angle(embeddings[a], embeddings[b]) - config.slack_margin)
        chosen = drawn[p] if config.negatives == "random" else negatives(labels, a)
        exponents = [config.scale * cosine(embeddings[a], embeddings[n]) - near for n in chosen]
        top = max(0.0, *exponents)
        terms.append(top + log(exp(-top) + sum(exp(e - top) for e in exponents)))
    cos_positive = [cosine(embeddings[i], embeddings[j]) for i, j in positive]
    cos_negative = [cosine(embeddings[i], embeddings[j]) for i, j in negative]
    spread_positive = mean(relu((1 - config.variance_epsilon) * mean(cos_positive) - c) ** 2 for c in cos_positive)
    spread_negative = mean(relu(c - (1 + config.variance_epsilon) * mean(cos_negative)) ** 2 for c in cos_negative)
    return mean(terms) + config.variance_weight * (spread_positive + spread_negative)


def drawn_negatives(labels, positive):
    """Return the draw of `random_negatives` from a generator seeded with 0: column g of row p is the position within class g."""
    classes = sorted(set(labels))
    draws = torch.rand(len(positive), len(classes), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = []
    for (anchor, _), row in zip(positive, draws, strict=True):
        members = [[i for i, y in enumerate(labels) if y == c] for c in classes]
        chosen.append([m[int(u * len(m))] for c, m, u in zip(classes, members, row, strict=True) if c != labels[anchor]])
    return chosen


def sgsl(loss, embeddings, labels):
    config, weights = loss.config, loss.weight_CD.tolist()
    num_classes = len(weights)
    smoothed, stopped = [], []
    for x, y in zip(embeddings, labels, strict=True):
        target = [1 - config.label_smoothing if c == y else config.label_smoothing / (num_classes - 1) for c in range(num_classes)]
        smoothed.append(cross_entropy([dot(w, x) for w in weights], target))
        others = log(sum(exp(config.gamma * cosine(w, x)) for c, w in enumerate(weights) if c != y)) / config.gamma
        stopped.append(softplus(others - cosine(weights[y], x)))
    return mean(smoothed) + (config.weight * mean(stopped) if mean(smoothed) <= config.gate else 0.0)


def triplet_semi_hard(loss, embeddings, labels):
    terms = []
    for a, p in pairs(labels, True):
        near = distance(unit(embeddings[a]), unit(embeddings[p])) ** 2
        far = [distance(unit(embeddings[a]), unit(embeddings[n])) ** 2 for n in negatives(labels, a)]
        if far:
            beyond = [d for d in far if d > near + 1e-12]
            terms.append(relu(near - (min(beyond) if beyond else max(far)) + loss.config.margin))
    return mean(terms) if terms else 0.0


def triplet_global(loss, embeddings, labels):
    positive, negative, options = [], [], loss.config
    for a, p in pairs(labels, True):
        far = [distance(unit(embeddings[a]), unit(embeddings[n])) ** 2 / 4 for n in negatives(labels, a)]
        if far:
            positive.append(distance(unit(embeddings[a]), unit(embeddings[p])) ** 2 / 4)
            negative.append(min(far))
    if not positive:
        return 0.0
    triplet = mean(relu(near - far + options.margin) for near, far in zip(positive, negative, strict=True))
    variances = [mean((d - mean(side)) ** 2 for d in side) for side in (positive, negative)]
    gap = relu(mean(positive) - mean(negative) + options.global_margin)
    return triplet + options.global_weight * (sum(variances) + options.mean_weight * gap)


def triplet_batch_hard(loss, embeddings, labels):
    terms = []
    for a, y in enumerate(labels):
        near = [distance(embeddings[a], embeddings[p]) for p in range(len(labels)) if labels[p] == y and p != a]
        far = [distance(embeddings[a], embeddings[n]) for n in negatives(labels, a)]
        if near and far:
            excess = max(near) - min(far)
            terms.append(softplus(excess) if loss.config.margin is None else relu(excess + loss.config.margin))
    return mean(terms) if terms else 0.0


def contrastive(loss, embeddings, labels):
    terms = [distance(unit(embeddings[i]), unit(embeddings[j])) ** 2 for i, j in pairs(labels, True)]
    terms += [relu(loss.config.margin - distance(unit(embeddings[i]), unit(embeddings[j]))) ** 2 for i, j in pairs(labels, False)]
    return mean(terms) / 2 if terms else 0.0


def proxy_nca(loss, embeddings, labels):
    proxies = [unit(p) for p in loss.proxies_CD.tolist()]
    terms = []
    for x, y in zip(embeddings, labels, strict=True):
        near = [exp(-loss.config.scale * distance(unit(x), p) ** 2) for p in proxies]
        terms.append(-log(near[y] / (sum(near) - near[y])))
    return mean(terms)


def center_loss(loss, embeddings, labels):
    centres = loss.centres_CD.tolist()
    return loss.config.weight / 2 * mean(distance(x, centres[y]) ** 2 for x, y in zip(embeddings, labels, strict=True))


def ring_loss(loss, embeddings, labels):
    return loss.config.weight / 2 * mean((norm(x) - loss.radius.item()) ** 2 for x in embeddings)


def l2_constrained_softmax(loss, embeddings, labels):
    weights, biases, radius = loss.classifier.weight.tolist(), loss.classifier.bias.tolist(), loss.radius.item()
    share, terms = loss.config.dropout, []
    drawn = torch.rand(len(embeddings), len(embeddings[0]), generator=torch.Generator().manual_seed(0)).tolist()  # the step's generator
    for x, y, draws in zip(embeddings, labels, drawn, strict=True):
        seen = [radius * value / (1 - share) if draw >= share else 0.0 for value, draw in zip(unit(x), draws, strict=True)]
        logits = [dot(w, seen) + b for w, b in zip(weights, biases, strict=True)]
        terms.append(cross_entropy(logits, one_hot(y, len(weights), loss.config.label_smoothing)))
    return mean(terms)


def combined(loss, embeddings, labels):
    return sum(t.weight * REFERENCES[t.name](part, embeddings, labels) for t, part in zip(loss.config.terms, loss.losses, strict=True))


def reference(name, loss, embeddings_ND, labels_N):
    """Return the named reference's total as a float64 tensor."""
    return torch.tensor(REFERENCES[name](loss, embeddings_ND.tolist(), labels_N.tolist()), dtype=torch.float64)


REFERENCES = {
    "softmax": softmax,
    "normalised_softmax": normalised_softmax,
    "softtriple": softtriple,
    "hardtriple": hardtriple,
    "heated_up_softmax": heated_up_softmax,
    "discriminative": discriminative,
    "tuplet_margin": tuplet_margin,
    "sgsl": sgsl,
    "triplet_semi_hard": triplet_semi_hard,
    "triplet_batch_hard": triplet_batch_hard,
    "triplet_global": triplet_global,
    "contrastive": contrastive,
    "proxy_nca": proxy_nca,
    "center_loss": center_loss,
    "ring_loss": ring_loss,
    "l2_constrained_softmax": l2_constrained_softmax,
    "combined": combined,
}
