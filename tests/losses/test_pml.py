"""`pml:<ClassName>`: any loss of pytorch-metric-learning by name, with checked options and the run's random generator."""

import inspect

import pytest
import torch
from loss_cases import DIM, NUM_CLASSES, random_batch
from loss_references import distance, dot, log, mean, negatives, pairs, relu, unit
from loss_references import exp as e
from pytorch_metric_learning import distances, losses, miners, regularizers

from dml_core.errors import ConfigError
from dml_core.losses.contract import Needs
from dml_core.losses.registry import build_loss

EMBEDDINGS, LABELS = random_batch()
# A base class, two losses without labels, and one that fails in the second step.
UNUSABLE = {"GenericPairLoss", "VICRegLoss", "ManifoldLoss", "DynamicSoftMarginLoss"}
SMALL = {
    "HistogramLoss": {"n_bins": 10},
    "P2SGradLoss": {"descriptors_dim": DIM},
    "RankedListLoss": {"margin": 0.4, "Tn": 10.0},
}
ALL = sorted(
    name
    for name, found in vars(losses).items()
    if inspect.isclass(found) and issubclass(found, losses.BaseMetricLossFunction) and found is not losses.BaseMetricLossFunction
)


def test_the_library_has_losses_to_walk():
    assert len(ALL) > 25


@pytest.mark.parametrize("name", sorted(set(ALL) - UNUSABLE))
def test_every_loss_of_the_library_trains_by_its_name(name):
    loss = build_loss(f"pml:{name}", SMALL.get(name, {}), NUM_CLASSES, DIM)
    network = torch.nn.Linear(DIM, DIM)
    optimiser = torch.optim.SGD([*network.parameters(), *loss.parameters()], lr=0.01)
    for step in range(2):
        optimiser.zero_grad()
        total = loss(network(EMBEDDINGS.float()), LABELS, torch.Generator().manual_seed(step)).total
        total.backward()
        assert torch.isfinite(total)
        assert torch.isfinite(network.weight.grad).all()
        optimiser.step()


@pytest.mark.parametrize("name", sorted(set(ALL) - UNUSABLE))
def test_all_tensors_of_a_loss_move_with_it_and_its_state_is_the_library_s(name):
    loss = build_loss(f"pml:{name}", SMALL.get(name, {}), NUM_CLASSES, DIM)
    assert set(loss.state_dict()) == {f"loss.{key}" for key, _ in loss.loss.named_parameters()}
    loss.to("meta")
    tensors = [value for module in loss.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    assert [value for value in (*tensors, *loss.parameters(), *loss.buffers()) if not value.is_meta] == []
    if name == "MarginLoss":
        assert loss.loss.beta.is_meta


@pytest.mark.parametrize("name", sorted(UNUSABLE))
def test_a_loss_that_cannot_train_is_unknown(name):
    with pytest.raises(ConfigError, match=f"unknown pytorch-metric-learning loss '{name}'"):
        build_loss(f"pml:{name}", {}, NUM_CLASSES, DIM)


def test_lifted_structure_is_equation_4_of_song_et_al():
    """J = 1 / (2 |P|) sum over positive pairs of [log(sum of exp(1 - d) over both anchors' negatives) + d_ij]_+^2."""
    x, y = [unit(v) for v in EMBEDDINGS.tolist()], LABELS.tolist()
    terms = []
    for i, j in pairs(y, True):
        pushed = sum(e(1 - distance(x[a], x[n])) for a in (i, j) for n in negatives(y, a))
        terms.append(relu(log(pushed) + distance(x[i], x[j])) ** 2)
    total = build_loss("pml:LiftedStructureLoss", {}, NUM_CLASSES, DIM)(EMBEDDINGS, LABELS).total
    torch.testing.assert_close(total, torch.tensor(mean(terms) / 2, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_n_pairs_is_sohn_s_loss_with_its_norm_regulariser():
    """One anchor and one positive per class, in the batch's order; dot products of unnormalised embeddings."""
    options = {"distance": {"name": "DotProductSimilarity", "normalize_embeddings": False}}
    x = EMBEDDINGS.tolist()
    logits = [[dot(x[a], x[p + NUM_CLASSES]) for p in range(NUM_CLASSES)] for a in range(NUM_CLASSES)]
    expected = mean(log(sum(e(value) for value in row)) - row[a] for a, row in enumerate(logits))
    total = build_loss("pml:NPairsLoss", options, NUM_CLASSES, DIM)(EMBEDDINGS, LABELS).total
    torch.testing.assert_close(total, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("num_classes", "num_each"), [(3, 3), (4, 2), (2, 4)])
def test_smooth_ap_is_equation_5_of_brown_et_al_for_as_many_classes_as_images_of_each_alone(num_classes, num_each):
    """1 - mean AP, with ranks by sigmoids. Other batches than n by n are divided at wrong places, and `tasks.checks` refuses them."""
    x, y = random_batch()[0].tolist()[: num_classes * num_each], [place // num_each for place in range(num_classes * num_each)]
    terms = []
    for q, label in enumerate(y):
        similar = [dot(unit(x[q]), unit(other)) for other in x]
        same = [i for i in range(len(y)) if y[i] == label]

        def rank(i, among, similar=similar):
            return 1 + sum(1 / (1 + e((similar[i] - similar[j]) / 0.1)) for j in among if j != i)

        terms.append(1 - mean(rank(i, same) / rank(i, range(len(y))) for i in same))
    loss = build_loss("pml:SmoothAPLoss", {"temperature": 0.1}, num_classes, DIM)
    total = float(loss(torch.tensor(x, dtype=torch.float64), torch.tensor(y)).total)
    assert (total == pytest.approx(mean(terms), abs=1e-6)) == (num_classes == num_each)


def test_a_miner_and_a_distance_come_by_name():
    options = {"margin": 0.3, "miner": {"name": "BatchHardMiner"}, "distance": {"name": "LpDistance", "power": 2}}
    loss = build_loss("pml:TripletMarginLoss", options, NUM_CLASSES, DIM)
    assert (type(loss.miner).__name__, loss.loss.distance.power, loss.loss.margin) == ("BatchHardMiner", 2, 0.3)
    unmined = build_loss("pml:TripletMarginLoss", {"margin": 0.3, "distance": {"name": "LpDistance", "power": 2}}, NUM_CLASSES, DIM)
    assert loss(EMBEDDINGS, LABELS).total != unmined(EMBEDDINGS, LABELS).total


def test_objects_within_objects_come_by_name():
    """Nested options configure a miner's distance: the loss equals the one built by hand from the library's classes."""
    squared = {"name": "LpDistance", "power": 2}
    miner = {"name": "TripletMarginMiner", "margin": 0.2, "type_of_triplets": "semihard", "distance": squared}
    loss = build_loss("pml:TripletMarginLoss", {"margin": 0.2, "distance": squared, "miner": miner}, NUM_CLASSES, DIM)
    by_hand = miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard", distance=distances.LpDistance(power=2))
    theirs = losses.TripletMarginLoss(margin=0.2, distance=distances.LpDistance(power=2))
    output = loss(EMBEDDINGS, LABELS)
    assert output.total == output.parts["TripletMarginLoss"] == theirs(EMBEDDINGS, LABELS, by_hand(EMBEDDINGS, LABELS))


def test_null_unsets_an_option_at_every_depth():
    """A variant takes away what a layer below gives: the library's default holds."""
    given = {"margin": None, "miner": None, "distance": {"name": "LpDistance", "power": None}}
    loss = build_loss("pml:TripletMarginLoss", given, NUM_CLASSES, DIM)
    assert loss.miner is None
    plain = build_loss("pml:TripletMarginLoss", {"distance": {"name": "LpDistance"}}, NUM_CLASSES, DIM)
    assert loss.loss.margin == plain.loss.margin
    assert loss.config == plain.config


def test_a_regulariser_is_told_the_number_of_classes():
    options = {"centers_per_class": 2, "weight_regularizer": {"name": "SparseCentersRegularizer", "centers_per_class": 2}}
    loss = build_loss("pml:SoftTripleLoss", options, NUM_CLASSES, DIM)
    bare = build_loss("pml:SoftTripleLoss", {"centers_per_class": 2}, NUM_CLASSES, DIM)
    bare.load_state_dict(loss.state_dict())
    embeddings_ND = EMBEDDINGS.float()
    regulariser = regularizers.SparseCentersRegularizer(NUM_CLASSES, 2)(loss.loss.fc.T)
    torch.testing.assert_close(loss(embeddings_ND, LABELS).total, bare(embeddings_ND, LABELS).total + regulariser)


def test_draws_come_from_the_run_s_generator_and_leave_the_global_state_alone():
    loss = build_loss("pml:TripletMarginLoss", {"triplets_per_anchor": 1}, NUM_CLASSES, DIM)
    state = torch.get_rng_state()
    first, again, other = (loss(EMBEDDINGS, LABELS, torch.Generator().manual_seed(seed)).total for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first == again
    assert first != other
    assert len({loss(EMBEDDINGS, LABELS, torch.Generator().manual_seed(seed)).total.item() for seed in range(100)}) > 90


def test_what_the_adapter_asks_of_the_loop():
    def needs(name: str, **options: object) -> Needs:
        return build_loss(f"pml:{name}", options, NUM_CLASSES, DIM).needs

    pairs_of_a_class, any_batch = Needs(sampler="k_by_n", global_batch=True), Needs(sampler="any", global_batch=True)
    assert needs("TripletMarginLoss") == needs("MarginLoss", learn_beta=True) == pairs_of_a_class
    assert needs("ArcFaceLoss") == needs("P2SGradLoss", descriptors_dim=DIM) == any_batch


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("TripletMarginLos", {}, "did you mean 'TripletMarginLoss'"),
        (
            "TripletMarginLoss",
            {"margn": 0.1},
            r"^loss 'pml:TripletMarginLoss': TripletMarginLoss has no option 'margn'; did you mean 'margin'\? ",
        ),
        ("TripletMarginLoss", {"zzz": 1}, r"no option 'zzz' \(it has: collect_stats, distance, [\w, ]+ reducer, smooth_loss, [\w, ]+\)$"),
        ("ArcFaceLoss", {"num_classes": 3}, "has no option 'num_classes'"),
        ("ContrastiveLoss", {"neg_margin": float("inf")}, "ContrastiveLoss: option 'neg_margin' is not a finite number$"),
        ("ContrastiveLoss", {"neg_margin": float("nan")}, "ContrastiveLoss: option 'neg_margin' is not a finite number$"),
        ("ContrastiveLoss", {"distance": {"name": "LpDistance", "p": float("-inf")}}, "LpDistance: option 'p' is not a finite number$"),
        ("ArcFaceLoss", {"reducer": {"name": "ClassWeightedReducer", "weights": [1.0, float("inf")]}}, "'weights' is not a finite number$"),
        ("TripletMarginLoss", {"miner": {"name": "BatchHardMine"}}, "did you mean 'BatchHardMiner'"),
        ("TripletMarginLoss", {"miner": {"name": "TripletMarginMiner", "margni": 1}}, "did you mean 'margin'"),
        ("TripletMarginLoss", {"miner": "BatchHardMiner"}, "TripletMarginLoss: option 'miner' is a mapping of 'name' and options"),
        ("TripletMarginLoss", {"miner": {"margin": 1}}, r"'miner' is a mapping of 'name' and options, found \{'margin': 1\}$"),
        ("TripletMarginLoss", {"miner": {"name": 5}}, r"'miner' is a mapping of 'name' and options, found \{'name': 5\}$"),
        ("TripletMarginLoss", {"miner": {"name": "BatchHardMiner", "distance": "LpDistance"}}, "BatchHardMiner: option 'distance'"),
        ("TripletMarginLoss", {"miner": {"name": "BatchHardMiner", "distance": {"name": "LpDist"}}}, "did you mean 'LpDistance'"),
        (
            "TripletMarginLoss",
            {"miner": {"name": "BatchHardMiner", "distance": {"name": "LpDistance", "pwer": 2}}},
            "LpDistance has no option 'pwer'; did you mean 'power'",
        ),
        (
            "SoftTripleLoss",
            {"weight_regularizer": {"name": "SparseCentersRegularizer", "num_classes": 5, "centers_per_class": 10}},
            "SparseCentersRegularizer has no option 'num_classes'",
        ),
        ("SoftTripleLoss", {"weight_regularizer": {"name": "SparseCentersRegularizer"}}, "refuses its options"),
        (
            "TupletMarginLoss",
            {"distance": {"name": "LpDistance"}},
            "refuses its options: TupletMarginLoss requires the distance metric to be",
        ),
        ("SoftTripleLoss", {"distance": {"name": "LpDistance"}}, "refuses its options: AssertionError"),
        ("P2SGradLoss", {}, "refuses its options"),
        ("P2SGradLoss", {"descriptors_dim": 7}, "refuses its options: mat1 and mat2 shapes"),
        ("TripletMarginLoss", {"reducer": {"name": "PerAnchorReducer"}}, "refuses its options: Triplet reduction not supported$"),
        ("ArcFaceLoss", {"reducer": {"name": "DoNothingReducer"}}, "refuses its options"),
        ("ArcFaceLoss", {"reducer": {"name": "ClassWeightedReducer", "weights": [1, 2, 1, 1, 1]}}, "refuses its options"),
    ],
)
def test_wrong_names_and_options_are_refused_in_one_line(name, options, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        build_loss(f"pml:{name}", options, NUM_CLASSES, DIM)
    assert "\n" not in str(refusal.value)
