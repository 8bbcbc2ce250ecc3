"""infra/Dockerfile: the image is built and run, without a network and with files that it cannot write.

The packages of infra/requirements.lock come from a registry. With `DML_TEST_IMAGES` the images stay in that folder for the next run.
`UV_INSECURE_HOST` names registries whose certificate the build cannot verify; their packages are verified by the lock's hashes.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dml_core.config import merge, read_yaml
from tests.conftest import ROOT
from tests.e2e.conftest import SMALL, steps_run
from tests.e2e.containers import PROJECT, Container, Image, Images, bound, can_build, is_ours, tmpfs

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.skipif(not can_build(), reason="no buildah, debootstrap and crun here")]

TAG = "localhost/dml-repro:cpu"
(LEFT_OUT,) = re.findall(r'--build-arg LEFT_OUT="(.+)"', (ROOT / "infra" / "Dockerfile").read_text())
LASTING = ("data", "results", "state")
SERVE = """
set -e
dml index synthetic/softtriple data/raw/synthetic/CUB_200_2011/images -o state/index
dml serve state/index --port 8321 & server=$!
until python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8321/v1/health')" 2>/dev/null; do kill -0 $server; sleep 1; done
python3 - <<'END'
import base64, json, urllib.request
from pathlib import Path
image = sorted(Path("data/raw/synthetic").rglob("*.jpg"))[0]
body = json.dumps({"images": [base64.b64encode(image.read_bytes()).decode()], "k": 3}).encode()
request = urllib.request.Request("http://127.0.0.1:8321/v1/search", body, {"Content-Type": "application/json"})
nearest = json.load(urllib.request.urlopen(request))["results"][0][0]
print("asked for", image.name, "nearest", Path(nearest["name"]).name)
END
kill $server; wait $server || true
"""


def images_folder(default: Path) -> Path:
    return Path(os.environ.get("DML_TEST_IMAGES") or default)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """A store with the built image."""
    folder = images_folder(tmp_path_factory.mktemp("images"))
    store = Images(folder)
    if TAG not in store.buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
        store.build(TAG, store.make_base(), LEFT_OUT)
    yield store
    if not os.environ.get("DML_TEST_IMAGES"):
        store.close()


@pytest.fixture(scope="module")
def image(images: Images) -> Iterator[Image]:
    mounted = images.mount(TAG)
    yield mounted
    images.buildah("rm", "--all")


@pytest.fixture(scope="module")
def small_params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A params.yaml with one small dataset, one variant and one seed."""
    params = merge(read_yaml(ROOT / "params.yaml"), SMALL | {"scale": {"num_workers": 1, "concurrent_runs": 1}})
    comparison = params["comparison"]
    comparison["variants"] = {"softtriple": merge(comparison["variants"]["softtriple"], {"by_default": True})}
    comparison |= {"reference": None, "num_default_seeds": None, "datasets": {"synthetic": comparison["datasets"]["synthetic"]}}
    params["datasets"] = {"synthetic": params["datasets"]["synthetic"]}
    path = tmp_path_factory.mktemp("params") / "params.yaml"
    path.write_text(yaml.safe_dump(params, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def volumes(image: Image, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The volumes of one user of the image, by name."""
    folder = tmp_path_factory.mktemp("volumes")
    return {name: image.new_volume(folder / name, f"{PROJECT}/{name}") for name in LASTING}


def run(name: str, image: Image, folder: Path, volumes: dict[str, Path], params: Path, *command: str) -> str:
    """Run a command in a new container without a network, and return its output."""
    mounts = [bound(path, f"{PROJECT}/{place}") for place, path in volumes.items()]
    mounts += [tmpfs(place) for place in ("/tmp", "/home/dml", f"{PROJECT}/.dvc/tmp")] + [bound(params, f"{PROJECT}/params.yaml")]
    container = Container(name, image, folder, command, mounts=mounts, shm="2g")
    try:
        return container.run()
    finally:
        container.close()


def test_buildah_runs_it_as_its_user(images: Images, image: Image) -> None:
    container = images.buildah("from", "--pull-never", TAG)
    assert images.buildah("run", "--isolation", "chroot", container, "id", "--user") == "1000"
    findings = images.buildah("run", "--isolation", "chroot", container, "dml", "doctor")
    assert "can be written" in findings
    assert "wrong" not in findings


def test_a_comparison_a_second_one_and_a_query_run_without_a_network(
    image: Image, volumes: dict[str, Path], small_params: Path, tmp_path: Path
) -> None:
    def here(name: str, *command: str) -> str:
        printed = run(name, image, tmp_path / name, volumes, small_params, *command)
        print(printed)
        return printed

    assert "can be written" in here("dml-doctor", "dml", "doctor")
    first = here("dml-first", "dml", "reproduce", "--dataset", "synthetic", "--all")
    assert steps_run(first)["train"] == 1
    assert (volumes["results"] / "synthetic" / "report.md").is_file()
    assert "prepare@synthetic" in (volumes["state"] / "dvc.lock").read_text(), "in a volume, not in the container"
    assert any((volumes["state"] / "dvc-cache").rglob("*"))
    again = here("dml-again", "dml", "reproduce", "--dataset", "synthetic", "--all")
    assert steps_run(again) == {}, "a new container finds the finished steps"
    answer = here("dml-serve", "bash", "-c", SERVE)
    ((asked, nearest),) = re.findall(r"asked for (\S+) nearest (\S+)", answer)
    assert nearest == asked, "the image itself is in the index"
    assert all(is_ours(path) for folder in volumes.values() for path in folder.rglob("*"))


def test_the_image_can_write_its_volumes_only(image: Image, volumes: dict[str, Path], small_params: Path, tmp_path: Path) -> None:
    tries = (
        "for place in / /srv/dml /srv/dml/dml_core /srv/dml/.venv /etc /usr; do touch $place/x 2>/dev/null && echo wrote $place; done; true"
    )
    assert "wrote" not in run("dml-tries", image, tmp_path / "tries", volumes, small_params, "bash", "-c", tries)
    owned = subprocess.run(
        ["find", str(image.root), "-xdev", "-user", "1000", "-not", "-type", "l"], capture_output=True, text=True, check=True
    )
    places = {f"/{Path(line).relative_to(image.root)}" for line in owned.stdout.split()}
    kept = {"/srv/dml/data", "/srv/dml/results", "/srv/dml/state", "/srv/dml/.dvc/tmp"}
    assert kept <= places
    assert all(place in kept or place.startswith("/home/dml") for place in places)


def test_no_secret_no_registry_and_no_file_of_this_machine_is_in_it(images: Images, image: Image) -> None:
    text = images.buildah("inspect", "--type", "image", TAG)
    names = {name for name in os.environ if re.search("PASSWORD|SECRET|TOKEN|API_KEY", name)}
    secrets = {os.environ[name] for name in names if len(os.environ[name]) > 5}
    assert not [secret for secret in secrets if secret in text]
    for place in ("usr/local/ssl", "root/.config", "root/.cache", "home/dml/.cache", "srv/dml/.git", "var/cache/uv"):
        assert not list((image.root / place).rglob("*")), place
    for place in ("etc/pip.conf", "etc/uv/uv.toml"):  # the build mounts this machine's there: an empty file may stay
        assert not (image.root / place).exists() or (image.root / place).read_bytes() == b"", place
    installed = (image.root / "srv/dml/.venv").rglob("direct_url.json")
    addresses = {path.parent.name: path.read_text() for path in installed}
    assert all("file:///srv/dml" in address for address in addresses.values()), addresses
    certificates = image.root / "etc/ssl/certs/ca-certificates.crt"
    debian = sum(path.read_text().count("BEGIN") for path in (image.root / "usr/share/ca-certificates").rglob("*.crt"))
    assert certificates.read_text().count("BEGIN") == debian, "the machine's own authority is not trusted in the image"
    assert not shutil.which("pip", path=str(image.root / "srv/dml/.venv/bin"))
