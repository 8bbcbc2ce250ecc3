"""The documentation: links, commands, paths and words in its pages, and lists and values that they repeat from the code."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from markdown.extensions.toc import slugify
from playwright.sync_api import sync_playwright

from dml_core.evaluation.metric_info import METRICS
from dml_core.losses.registry import LOSSES
from dml_core.measurements.registry import MEASUREMENTS
from flows.cli.app import FirstByDefault, load_verb
from infra.docs import environment_variables, settings
from infra.docs.__main__ import FOLDER as GENERATED
from infra.docs.__main__ import PAGES as WRITTEN
from tests.conftest import ROOT
from tests.flows.verbs import options

DOCS = ROOT / "docs"
HISTORICAL = {"preregistration.md"}  # a record of its day: its words and paths stay
PAGES = sorted(path for path in DOCS.rglob("*.md") if not path.is_relative_to(DOCS / "pages"))
CURRENT = [path for path in PAGES if path.name not in HISTORICAL]
CHROMIUM = "/usr/bin/chromium"
READMES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
REPOSITORY = ("dml_core/", "tasks/", "flows/", "infra/", "docs/", "benchmarks/", "tests/", "results/", ".ci/", ".github/")
WRITTEN_LATER = re.compile(r"results/site|results/receipts|results/[\w-]*[A-Z]|flows/tables/tuned")
MANNERISMS = (
    *(r"beside", r"where there (is|are)", r"says? so", r"by itself", r"of its own", r"laid over|lies over", r"(is|are|be|was) told"),
    *(r"go(es)? on", r"went on", r"anew", r"taken up", r"what came of", r"in the place of", r"to the (bit|byte)", r"nothing of"),
    r"mend(s|ed)?",
)
NAME = r"[\"']([A-Z][A-Z0-9_]+)[\"']"
READ_BY_THE_CODE = re.compile(rf"environ(?:\.get|\.setdefault|\.pop)?[\[(]\s*{NAME}|{NAME} (?:not )?in os\.environ")
# Set by the system, by DVC, or by the project for its other processes.
INTERNAL = {"PATH", "PYTHONPATH", "TMPDIR", "NO_PROXY", "DVC_STAGE", "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", "CUBLAS_WORKSPACE_CONFIG"}
INTERNAL.add("S3_USER")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> str:
    """Return a page without its blocks of code."""
    return FENCE.sub("", path.read_text())


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as MkDocs makes them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.+?)\s*$", prose(path), re.MULTILINE):
        explicit = re.search(r"\{#([\w-]+)\}$", title)
        plain = LINK.sub(lambda link: link[0][1 : link[0].index("]")], title).replace("`", "").replace("*", "")
        slug = explicit[1] if explicit else slugify(plain, "-")
        number, unique = 0, slug
        while unique in found:
            number += 1
            unique = f"{slug}_{number}"
        found.add(unique)
    return found


def broken_links(page: Path) -> Iterator[str]:
    for link in (first or second for first, second in LINK.findall(prose(page))):
        if re.match(r"\w+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.is_file() and not (target.is_dir() and page in READMES):
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and target.name != "api.md" and anchor not in anchors(target):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.fixture(scope="module")
def commands() -> dict[tuple[str, ...], set[str]]:
    """Return the words of each command -> the names of its options."""
    return {words: set(by_name) for words, by_name in options().items()}


def dml_lines(text: str) -> Iterator[str]:
    """Yield the commands of `dml` in a page's shell blocks, with continued lines joined."""
    for _, language, block in FENCE.findall(text):
        if language == "sh":
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                for part in re.split(r"\s*(?:&&|;|\|)\s+(?=dml )", line.strip()):
                    if re.match(r"(?:\w+=\S+ )*dml ", part):
                        yield part


def faults_of(line: str, commands: dict[tuple[str, ...], set[str]]) -> Iterator[str]:
    words = shlex.split(line, comments=True)
    words = words[words.index("dml") + 1 :]
    words = words[: next((at for at, word in enumerate(words) if word in ("|", ">", "&&", "&", ";", "<")), len(words))]
    if words in (["--help"], ["--version"]):
        return
    verb, group = words[0], {command[1] for command in commands if command[0] == words[0] and len(command) == 2}
    command: tuple[str, ...] = (verb,)
    if group:
        has_default = isinstance(load_verb(verb), FirstByDefault) and words[1:2] != ["--help"]
        named = words[1] if len(words) > 1 else ""
        command = (verb, named) if named in group or not has_default else next(found for found in commands if found[0] == verb)
    if command not in commands:
        yield f"{line}: no such verb"
        return
    for word in words[1:]:
        option = word.partition("=")[0]
        if re.match(r"--?[A-Za-z]", option) and option not in commands[command]:
            yield f"{line}: no option {option}"


@pytest.mark.parametrize("page", [*CURRENT, *READMES], ids=name)
def test_commands_have_verbs_and_options_that_exist(page: Path, commands: dict[tuple[str, ...], set[str]]) -> None:
    assert [fault for line in dml_lines(page.read_text()) for fault in faults_of(line, commands)] == []


def test_a_wrong_command_is_found(commands: dict[tuple[str, ...], set[str]]) -> None:
    assert not list(faults_of("X=1 dml tune project/standing/softmax -d synthetic --trials 4 | head  # --no", commands))
    assert not list(faults_of("dml models synthetic --all", commands))
    for wrong in ("dml tuna x", "dml tune x --trial 3", "dml stack upp"):
        assert list(faults_of(wrong, commands)), wrong


@pytest.mark.parametrize("page", [*CURRENT, *READMES], ids=name)
def test_paths_of_the_repository_exist(page: Path) -> None:
    def exists(path: str) -> bool:
        path = path.split(":")[0].split("::")[0]
        return bool(list(ROOT.glob(path))) if "*" in path else (ROOT / path).exists()

    named = {code for code in CODE.findall(prose(page)) if code.startswith(REPOSITORY) and re.fullmatch(r"[\w./*:-]+", code)}
    assert [path for path in sorted(named) if not exists(path) and not WRITTEN_LATER.match(path)] == []


@pytest.mark.parametrize("page", [*CURRENT, *READMES], ids=name)
def test_words_are_plain(page: Path) -> None:
    text = CODE.sub("", prose(page))
    assert [found[0] for found in re.finditer(rf"\b(?:{'|'.join(MANNERISMS)})\b", text, re.IGNORECASE)] == []


@pytest.mark.parametrize("folder", ["dml_core", "tasks", "flows"])
def test_words_of_the_program_are_plain(folder: str) -> None:
    """Of messages, docstrings and help, not of comments."""
    words = re.compile(rf"\b(?:{'|'.join(MANNERISMS)})\b", re.IGNORECASE)
    texts = {
        (name(path), node.lineno): node.value
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert len(texts) > 1000
    assert {place: found for place, text in texts.items() if (found := [word[0] for word in words.finditer(text)])} == {}


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_lines_are_short(page: Path) -> None:
    lines = prose(page).splitlines()
    assert [line[:60] for line in lines if len(line) > 160 and "|" not in line and "](" not in line] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {path.relative_to(DOCS).as_posix() for path in PAGES} == set(navigation)


@pytest.mark.parametrize("page", WRITTEN)
def test_the_generated_pages_are_those_of_the_code(page: str) -> None:
    assert (GENERATED / page).read_text() == WRITTEN[page](), "run: make docs"


def test_every_measurement_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", (DOCS / "reference/metrics.md").read_text()))
    assert set(MEASUREMENTS) <= named


def test_every_metric_is_described() -> None:
    assert set(METRICS) <= set(re.findall(r"`([\w@]+)`", (DOCS / "reference/metrics.md").read_text()))


def test_every_loss_is_listed() -> None:
    assert set(LOSSES) <= set(re.findall(r"`(\w+)`", (DOCS / "reference/losses.md").read_text()))


def test_every_environment_variable_is_described() -> None:
    """The generated page itself fails if the project sets a variable without a reason, or has a reason for one that it does not set."""
    text = settings.page()
    assert "`RAY_worker_niceness`" in text
    found: set[str] = set()
    for path in (path for folder in ("dml_core", "tasks", "flows") for path in (ROOT / folder).rglob("*.py")):
        found |= {first or second for first, second in READ_BY_THE_CODE.findall(path.read_text())}
    assert {"DML_STATE", "RAY_ADDRESS"} <= found
    assert found - INTERNAL <= environment_variables.OF_THE_USER.keys() | environment_variables.REASONS.keys()


def test_every_setting_has_a_meaning() -> None:
    text = settings.page().partition("## Environment variables")[0]
    assert len(re.findall(r"^\| `\w+` \|", text, re.MULTILINE)) > 80
    assert re.findall(r"^\| `\w+` \| .*\| *\|$", text, re.MULTILINE) == []


def test_own_images_counts_the_variants_and_seeds_of_params_yaml() -> None:
    comparison = yaml.safe_load((ROOT / "params.yaml").read_text())["comparison"]
    variants, seeds = comparison["variants"], comparison["seeds"]
    num_default = sum(changes.get("by_default", True) for changes in variants.values())
    said = (
        f"{num_default} systems with {comparison['num_default_seeds']} seeds each; "
        f"`--all` runs all {len(variants)} systems with all {len(seeds)} seeds of `params.yaml`"
    )
    assert said in " ".join((DOCS / "tutorials/own-images.md").read_text().split())


def test_the_citation_has_the_version_and_licence_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_the_forges_files_are_yaml_and_its_ci_is_ours() -> None:
    for path in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(path.read_text()), path
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    loaded = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*\"")
    assert [found for page in pages for found in loaded.findall(page.read_text()) if 'rel="canonical"' not in found] == []
    assert (site / "pages/index.html").read_bytes() == (DOCS / "pages/index.html").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="no Chromium here")
def test_the_search_works_from_the_disk(site: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("embed_at_once")
        page.wait_for_selector(".md-search-result__item a[href*='settings.html']")
        browser.close()
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
