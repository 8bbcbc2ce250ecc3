"""A nonsensical params.yaml gives one line in under two seconds, whatever its content, and nothing is written."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from dml_core.config import flatten, merge, read_yaml
from dml_core.errors import ConfigError
from tasks.runs.params.file import load_params
from tasks.runs.specs import Params
from tests.conftest import ROOT

GOOD = (ROOT / "params.yaml").read_text()
SECONDS = 20.0  # a parser that multiplies takes minutes; a slow machine 2.4 for the largest file


def multiplied(width: int, depth: int) -> str:
    lines = ["a0: &a0 [" + ", ".join("x" * width) + "]"]
    lines += [f"a{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * width) + "]" for level in range(1, depth)]
    return "\n".join(lines) + "\n"


def changed(old: str, new: str) -> bytes:
    assert old in GOOD
    return GOOD.replace(old, new, 1).encode("utf-8", "surrogatepass")


SEEDS, EPOCHS, WIDTH = "seeds: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", "num_epochs: 48", "width: 16"
RAW, REFERENCE, VARIANT = "raw: data/raw/drawn-80", "reference: softmax", "    softmax: {"
# Kind of error -> the file; each is refused.
FILES: dict[str, bytes] = {
    "empty": b"",
    "a comment": b"# nothing\n",
    "a NUL": GOOD.encode() + b"\0",
    "not UTF-8": GOOD.encode() + b"# \xff\xfe",
    "UTF-16": GOOD.encode("utf-16"),
    "Latin-1": changed("# The standing", "# über The standing").decode().encode("latin-1"),
    "a list": b"- 1\n- 2\n",
    "a number": b"5",
    "a text": b"text",
    "two documents": b"a: 1\n---\nb: 2\n",
    "a tab": b"datasets:\n\tx: 1\n",
    "not closed": b"datasets: {x: [1, 2\n",
    "a control letter": b"datasets: \x07\n",
    "an anchor that is not there": b"datasets: *nowhere\n",
    "an alias of itself": b"datasets: &a {x: *a}\n",
    "aliases that multiply": multiplied(9, 9).encode() + GOOD.encode(),
    "aliases that multiply a little": multiplied(10, 5).encode() + GOOD.encode(),
    "merge keys that multiply": b"a: &a {x: 1}\nb: &b {<<: [*a, *a, *a]}\n" + GOOD.encode(),
    "braces nested": b"datasets: " + b"{a: " * 5000 + b"}" * 5000,
    "lists nested": b"datasets: " + b"[" * 5000 + b"]" * 5000,
    "dashes nested": b"datasets: \n" + b"- " * 5000 + b"1",
    "indented": b"".join(b" " * level + b"a:\n" for level in range(1200)),
    "many values": b"x: [" + b"1, " * 300_000 + b"]\n",
    "many keys": b"".join(b"k%d: 1\n" % number for number in range(60_000)),
    "many keys of one kind": changed("datasets:\n", "datasets:\n" + "".join(f"  k{number}: 1\n" for number in range(15_000))),
    "a long text": b"datasets: " + b"x" * 3_000_000,
    "a long key": b"k" * 2000 + b": 1\n",
    "Python's tag": changed(EPOCHS, "num_epochs: !!python/object/apply:os.system [touch pwned]"),
    "another tag": changed(EPOCHS, "num_epochs: !mine 3"),
    "a bool that is none": changed(EPOCHS, "num_epochs: !!bool maybe"),
    "an int that is none": changed(EPOCHS, "num_epochs: !!int ''"),
    "a float that is none": changed(EPOCHS, "num_epochs: !!float x"),
    "a time that is none": changed(EPOCHS, "num_epochs: !!timestamp x"),
    "binary that is none": changed(EPOCHS, "num_epochs: !!binary x"),
    "a date": changed(EPOCHS, "num_epochs: 2026-01-01"),
    "a day that is none": changed(EPOCHS, "num_epochs: 2026-13-45"),
    "a day that is none in a text's place": changed(RAW, "raw: 2026-02-30"),
    "5,000 digits": changed(EPOCHS, "num_epochs: " + "9" * 5000),
    "5,000 hexadecimal digits": changed(EPOCHS, "num_epochs: 0x" + "f" * 5000),
    "base 60": changed(EPOCHS, "num_epochs: " + ":".join(["59"] * 400)),
    "a negative number of epochs": changed(EPOCHS, "num_epochs: -1"),
    "epochs beyond any float": changed(EPOCHS, "num_epochs: 1e400"),
    "infinite epochs": changed(EPOCHS, "num_epochs: .inf"),
    "a rate that is no number": changed("learning_rate: 3e-3", "learning_rate: .nan"),
    "an infinite rate": changed("learning_rate: 3e-3", "learning_rate: .inf"),
    "a rate beyond any float": changed("learning_rate: 3e-3", "learning_rate: 1e999"),
    "a huge width": changed(WIDTH, "width: 1000000000"),
    "a huge embedding": changed("embedding_dim: 64", "embedding_dim: 1000000000"),
    "a huge crop": changed("{crop_size: 24, padding: 2}", "{crop_size: 1000000000}"),
    "a huge padding": changed("{crop_size: 24, padding: 2}", "{padding: 1000000000}"),
    "a width of none": changed(WIDTH, "width: 0"),
    "a negative seed": changed(SEEDS, "seeds: [0, -1]"),
    "a seed of 2^70": changed(SEEDS, f"seeds: [{2**70}]"),
    "a seed of 2^40": changed(SEEDS, f"seeds: [{2**40}]"),
    "a seed that is a text": changed(SEEDS, "seeds: ['0']"),
    "a seed that is true": changed(SEEDS, "seeds: [true]"),
    "a seed of 1.5": changed(SEEDS, "seeds: [1.5]"),
    "no seeds": changed(SEEDS, "seeds: []"),
    "seeds nested": changed(SEEDS, "seeds: [[0]]"),
    "a key twice": changed(REFERENCE, "reference: softmax\n  reference: softmax"),
    "a dataset twice": changed("  synthetic:  ", "  synthetic: {}\n  synthetic:  "),
    "a key of two kinds": changed("  synthetic:  ", "  1: {}\n  synthetic:  "),
    "a key that is null": changed("  synthetic:  ", "  ~: {}\n  synthetic:  "),
    "a key that is true": changed("  synthetic:  ", "  on: {}\n  synthetic:  "),
    "a key that is a list": changed("  synthetic:  ", "  ? [a]\n  : {}\n  synthetic:  "),
    "a key that is a mapping": changed("  synthetic:  ", "  ? {a: 1}\n  : {}\n  synthetic:  "),
    "a key that is half a letter": changed("  synthetic:  ", '  "\\uD800": {}\n  synthetic:  '),
    "a key of two lines": changed("  synthetic:  ", '  "a\\nb": {}\n  synthetic:  '),
    "a key that is empty": changed("  synthetic:  ", '  "": {}\n  synthetic:  '),
    "an unknown key": changed(REFERENCE, "referenz: softmax"),
    "an unknown key of many letters": changed(REFERENCE, f"{'r' * 900}: softmax"),
    "an unknown reference": changed(REFERENCE, "reference: hardmax"),
    "a reference that is a list": changed(REFERENCE, "reference: [softmax]"),
    "variants that share a row": changed(
        VARIANT, "    Soft_max: {loss: {name: softmax}}\n    soft-max: {loss: {name: softmax}}\n" + VARIANT
    ),
    "a variant that is a path": changed(VARIANT, "    a/b: {loss: {name: softmax}}\n" + VARIANT),
    "a variant that is a text": changed(VARIANT, "    x: softmax\n" + VARIANT),
    "a loss that is a path": changed("normalised-softmax: {loss: {name: normalised_softmax", "normalised-softmax: {loss: {name: ../x"),
    "a reader that is a path": changed("reader: synthetic", "reader: ../../os"),
    "an empty raw": changed(RAW, "raw: ''"),
    "raw of two lines": changed(RAW, 'raw: "a\\nb"'),
    "raw with a NUL": changed(RAW, 'raw: "a\\0b"'),
    "raw with half a letter": changed(RAW, 'raw: "\\uD800"'),
    "raw that DVC would replace": changed(RAW, "raw: ${raw}"),
    "raw around the project": changed(RAW, "raw: .."),
    "raw that is the project": changed(RAW, "raw: ."),
    "raw in packed data": changed(RAW, "raw: data/packed/x"),
    "raw around packed data": changed(RAW, "raw: data"),
    "raw in the state": changed(RAW, "raw: state/x"),
    "raw that is another's": changed(RAW, "raw: data/raw/synthetic"),
    "raw in another's": changed(RAW, "raw: data/raw/synthetic/x"),
    "raw by another way": changed(RAW, "raw: data/../data/raw/./synthetic"),
    "raw that is a list": changed(RAW, "raw: [a]"),
    "an option that is unknown": changed("num_modes: 4, seed: 0}\n  fashion", "num_modez: 4, seed: 0}\n  fashion"),
    "options that are a list": changed("options: {images_per_class: 300}", "options: [1]"),
    "a huge image": changed("image_size: 24", "image_size: 1000000000"),
    "half a worker": changed("num_workers: 1 ", "num_workers: 0.5 "),
    "workers upside down": changed("num_workers: 1 ", "num_workers: [4, 1] "),
    "a device that is none": changed("device: auto", "device: tpu"),
    "K of none": changed("recall_at: [1, 2, 4, 8]", "recall_at: []"),
    "K of 0": changed("recall_at: [1, 2, 4, 8]", "recall_at: [0]"),
    "a metric that is a mapping": changed("metric: cosine", "metric: {a: 1}"),
}


def refused(path: Path, overrides: tuple[str, ...] = ()) -> str | None:
    """Return the error that a file gives within the time limit, or None if it is accepted."""
    before, begun = sorted(path.parent.rglob("*")), time.process_time()
    try:
        load_params(path, overrides)
        text = None
    except ConfigError as error:
        text = str(error)
    assert time.process_time() - begun < SECONDS
    assert sorted(path.parent.rglob("*")) == before
    return text


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_nobody_can_mean_is_refused_in_a_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(FILES[what])
    text = refused(path)
    assert text is not None
    assert "params.yaml" in text
    assert len(text) < 2500


def test_there_are_a_hundred() -> None:
    assert len(FILES) >= 100


@pytest.mark.parametrize("text", [GOOD, "\ufeff" + GOOD, GOOD.replace("\n", "\r\n"), GOOD.replace("[synthetic]", "&d [synthetic]")])
def test_a_file_that_is_only_unusual_is_taken(text: str, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(text.encode())
    assert refused(path) is None


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:

    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for place in (tmp_path, tmp_path / "fifo", tmp_path / "circle", tmp_path / "none", tmp_path / "params.yaml" / "x"):
        assert refused(place) is not None
    path = tmp_path / "params.yaml"
    path.write_bytes(changed(RAW, "raw: circle"))
    assert refused(path) is None, "a link in a circle is for the reader to refuse"


# ---------------------------------------------------------------- every key

NASTY: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 10**9, 2**62, 0.5, -0.5, 1e300, float("nan"), float("inf"), "", "x", "../..", "a\nb", "x" * 5000),
    *([], [[]], [None], ["x", 1], {}, {"x": 1}, {"name": "x"}, {"": {}}, [0, 0], [1, 10**9]),
)


def keys_of(kind: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of a configuration, including nested ones."""
    for name, field in kind.model_fields.items():
        yield (*prefix, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, (*prefix, name))


def all_keys() -> list[tuple[str, ...]]:
    """Return the keys of the schema and of the repository's own file."""
    from dml_core.training.config import TrainingConfig

    written = [tuple(key.split(".")) for key in flatten(read_yaml(ROOT / "params.yaml"))]
    protocol = list(keys_of(TrainingConfig, ("comparison", "protocol")))
    parts = [key[:length] for key in written for length in range(1, len(key) + 1)]
    return sorted({*parts, *keys_of(Params), *protocol})


SMALL = merge(read_yaml(ROOT / "params.yaml"), {})
SMALL["datasets"] = {"synthetic": SMALL["datasets"]["synthetic"]}
SMALL["comparison"]["datasets"] = {"synthetic": SMALL["comparison"]["datasets"]["synthetic"]}
SMALL["comparison"]["variants"] = {name: SMALL["comparison"]["variants"][name] for name in ("softmax", "softtriple")}


def replaced(key: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the small parameters with another value at a key."""
    values: dict[str, Any] = merge(SMALL, {})
    inner = values
    for part in key[:-1]:
        inner[part] = dict(inner[part]) if isinstance(inner.get(part), dict) else {}
        inner = inner[part]
    inner[key[-1]] = value
    return values


@given(st.sampled_from(all_keys()), st.sampled_from(NASTY))
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
def test_any_value_at_any_key_is_taken_or_refused_in_a_line(tmp_path: Path, key: tuple[str, ...], value: Any) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(replaced(key, value), sort_keys=False))
    refused(path)
    path.write_text(yaml.safe_dump(SMALL, sort_keys=False))
    refused(
        path, (f"{'.'.join(key)}={yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix(chr(10) + '...' + chr(10))}",)
    )


@pytest.mark.proof
def test_every_value_at_every_key_is_taken_or_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    for key in all_keys():
        for value in NASTY:
            path.write_text(yaml.safe_dump(replaced(key, value), sort_keys=False))
            refused(path)


@pytest.mark.slow
def test_the_command_says_it_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_bytes(FILES["lists nested"])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DML_")} | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-m", "flows.cli", "data", "list"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert "params.yaml" in ran.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["params.yaml"]
