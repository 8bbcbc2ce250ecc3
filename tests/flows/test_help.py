"""The help of every verb: groups, usage, examples that the command accepts, and options that are choices or have one name."""

import re
import shlex
import subprocess
import sys
from typing import get_args

import pytest
from typer.testing import CliRunner

from dml_core.evaluation.config import Metric
from dml_core.index.choosing import FAISS_NAMES
from dml_core.network_description import GraphFile
from flows.cli.app import GROUPS, VERBS, FirstByDefault, app, load_verb
from infra.docs.command_line import examples_of
from tasks.scores.scoring import INDEXES
from tasks.tables.choice import Track
from tests.conftest import ROOT
from tests.flows.verbs import leaves, options

LEAVES = dict(leaves())


def help_of(words: str) -> str:
    shown = CliRunner().invoke(app, [*words.split(), "--help"], prog_name="dml", terminal_width=80)
    assert shown.exit_code == 0
    return shown.stdout


@pytest.mark.parametrize("words", ["", *dict.fromkeys([*VERBS, *LEAVES])])
def test_help_has_the_usage_whole_sentences_and_short_lines(words: str) -> None:
    text = help_of(words)
    assert text.startswith(f"Usage: dml {words}".rstrip())
    assert len(text.splitlines()) > 4
    assert "..." not in re.sub(r"\S*\.\.\.|\.\.\.]", "", text)
    assert not re.search(r"\.\.\.[\]}]\.\.\.", text), "an argument repeats once"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_listed_with_the_first_line_of_its_help(verb: str) -> None:
    assert load_verb(verb).help.splitlines()[0] == VERBS[verb][1]


def test_the_help_lists_the_verbs_in_groups() -> None:
    lines = help_of("").splitlines()
    titles = [line.rstrip(":") for line in lines if re.fullmatch(r"\w.*:", line) and not line.startswith("Usage")]
    assert titles == ["Options", *GROUPS]
    places = [next(place for place, line in enumerate(lines) if line.startswith(f"  {verb} ")) for verb in VERBS]
    assert places == sorted(places)
    assert len({lines[place].index(VERBS[verb][1]) for verb, place in zip(VERBS, places, strict=True)}) == 1, "one column for all groups"


def test_the_help_loads_no_verb() -> None:
    code = "import sys; from flows.cli.app import app; app(['--help'], standalone_mode=False); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "flows.cli.app" in loaded
    assert {f"flows.cli.{module}" for module, _ in VERBS.values()} & {*loaded} == set()
    assert {"rich", "pydantic", "torch"} & {*loaded} == set()


@pytest.mark.parametrize("words", LEAVES)
def test_the_help_ends_with_examples_that_the_command_accepts(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(LEAVES[words], "callback", lambda **_: called.append(words))
    examples = examples_of(LEAVES[words])
    assert 1 <= len(examples) <= 2
    assert help_of(words).splitlines()[-len(examples) :] == [f"    {example}" for example in examples]
    for number, example in enumerate(examples, start=1):
        dml, *arguments = shlex.split(example.partition(" | ")[0])
        assert dml == "dml"
        ran = CliRunner().invoke(app, arguments)
        assert (ran.exit_code, called) == (0, [words] * number), ran.output


@pytest.mark.parametrize("verb", [verb for verb in VERBS if isinstance(load_verb(verb), FirstByDefault)])
def test_a_group_with_a_default_verb_has_its_options_and_examples(verb: str) -> None:
    name, default = next(iter(load_verb(verb).commands.items()))
    text = help_of(verb)
    assert text.startswith(f"Usage: dml {verb} [{name}] [OPTIONS]")
    own = help_of(f"{verb} {name}")
    for parameter in default.params:
        shown = parameter.opts[0] if parameter.param_type_name == "option" else f"  {parameter.display_name_raw} "
        assert shown in own
        assert shown in text
    assert all(example in text for example in examples_of(default))


# ---------------------------------------------------------------- options


def test_every_output_option_has_one_name() -> None:
    found = {name for by_name in options().values() for name in by_name}
    assert {"--out", "--json-file", "--folder"} & found == set()
    for words, by_name in options().items():
        assert ("-o" in by_name) == ("--output" in by_name), words
        assert "--json" not in by_name or by_name["--json"].is_flag, words


def test_an_option_with_a_fixed_set_of_values_is_a_choice() -> None:
    listed = re.compile(r"(?:^|: )[\w-]+(?:, [\w-]+)* or [\w-]+(?: \(.*\))?\.")
    for words, by_name in options().items():
        for name, option in by_name.items():
            if option.param_type_name == "option" and option.type_descriptor.choices is None and not option.is_flag:
                assert not listed.search(option.help or ""), f"{words} {name}: {option.help}"
                assert "|" not in (option.metavar or "") or option.metavar == "N|auto", f"{words} {name}"


@pytest.mark.parametrize(
    ("words", "name", "values"),
    [
        (("models", "export"), "--format", get_args(GraphFile.model_fields["format"].annotation)),
        (("models", "export"), "--precision", get_args(GraphFile.model_fields["precision"].annotation)),
        (("evaluate",), "--metric", get_args(Metric)),
        (("evaluate",), "--approximate", (*INDEXES,)),
        (("index", "build"), "--approximate", (*FAISS_NAMES, "auto")),
        (("plan",), "--track", get_args(Track)),
        (("reproduce",), "--track", get_args(Track)),
    ],
)
def test_choices_are_those_of_the_code(words: tuple[str, ...], name: str, values: tuple[str, ...]) -> None:
    assert values
    assert tuple(options()[words][name].type_descriptor.choices) == values
