"""Smoke runs in the tables' flow: they always run again, one run per table is published, and a network is deleted after its last use.

A hundred networks of a hundred megabytes would fill a disk, and are not needed: only whether they train is tested.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flows.outcomes import Failure, Outcome, finish
from flows.run import Chain
from flows.services import Services
from tasks.runs.identity import evaluate_identity, published_identity, train_identity
from tasks.runs.records import DatasetRecord
from tasks.runs.specs import RunSpec
from tasks.tables.smoke import table_of


@dataclass
class SmokeChain:
    """Steps of a smoke run (`flows.outcomes.Waited`)."""

    chain: Chain
    train_key: str
    users: Counter[str]
    services: Services

    @property
    def spec(self) -> RunSpec:
        """The run."""
        return self.chain.spec

    @property
    def must_train(self) -> bool:
        """True if this run trains the network it shares with others."""
        return self.chain.must_train

    def wait(self) -> Exception | None:
        """Wait until every step has ended; return the first failed step's error, or None."""
        return self.chain.wait()

    def outcome(self) -> Outcome:
        """Return the outcome; delete the network if no other run waits for it."""
        outcome = self.chain.outcome()
        self.users[self.train_key] -= 1
        if not self.users[self.train_key]:
            self.services.store.clear(self.train_key)
        return outcome


def run_smoke(
    runs: Sequence[RunSpec], prepared: dict[str, DatasetRecord], services: Services, fail_fast: bool
) -> tuple[list[Outcome], list[Failure]]:
    """Submit every run's chain, and wait for all; shared steps run once."""
    chains = _submit(runs, prepared, services)
    services.announce(len(chains), sum(chain.must_train for chain in chains))
    return finish(chains, services, fail_fast)


def _submit(runs: Sequence[RunSpec], prepared: dict[str, DatasetRecord], services: Services) -> list[SmokeChain]:
    keys = [f"train/{train_identity(spec, prepared[spec.dataset])}" for spec in runs]
    users = Counter(keys)
    chains: list[SmokeChain] = []
    tables: set[str] = set()
    for spec, key in zip(runs, keys, strict=True):
        dataset = prepared[spec.dataset]
        published_id = published_identity(spec, evaluate_identity(spec, dataset))
        left_out = frozenset({published_id} if table_of(spec) in tables else ())
        tables.add(table_of(spec))
        chains.append(SmokeChain(Chain(spec, dataset, services, True, left_out), key, users, services))
    return chains
