"""Weights: published formats load strictly, damaged ones are refused with a list, files are verified by hash."""

import functools
import hashlib
import http.server
import io
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torchvision

from dml_core.config import parse
from dml_core.errors import ConfigError
from dml_core.models.backbones import published as published_files
from dml_core.models.backbones.config import BackboneConfig
from dml_core.models.backbones.published import PUBLISHED, PublishedFile, fetch_published, how_to_get, is_kept
from dml_core.models.backbones.registry import BACKBONES, TIMM_PREFIX, TRAINED_WITH, build_backbone
from tests.damage import flip


def saved(state, path):
    torch.save(state, path)
    return str(path)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def published(name):
    """Return a state dict with the names and shapes of the published file and random values."""
    torch.manual_seed(5)
    if name == "googlenet":
        return torchvision.models.googlenet(init_weights=False, aux_logits=True).state_dict()
    if name == "vgg16":  # with a classifier of the right names, but not its 500 MB
        features = build_backbone(BackboneConfig(name="vgg16")).state_dict()
        return features | {f"classifier.{layer}.{kind}": torch.zeros(1) for layer in (0, 3, 6) for kind in ("weight", "bias")}
    if name == "bn_inception":
        features = build_backbone(BackboneConfig(name="bn_inception")).state_dict()
        return features | {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}
    return torchvision.models.get_model(name).state_dict()


def same(backbone, state):
    own = backbone.state_dict()
    return all(torch.equal(value, state[key].reshape(value.shape)) for key, value in own.items() if key in state)


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "vgg16", "bn_inception"])
def test_a_published_file_loads(name, tmp_path):
    state = published(name)
    backbone = build_backbone(BackboneConfig(name=name, weights=saved(state, tmp_path / "w.pth")))
    assert same(backbone, state)


def test_bn_inceptions_three_published_forms_are_416_485_and_old_tensors(tmp_path):
    whole = published("bn_inception")
    without_counters = {key: value for key, value in whole.items() if not key.endswith("num_batches_tracked")}
    rows = {key: value[None] if "_bn." in key else value for key, value in without_counters.items()}
    assert (len(whole), len(without_counters)) == (485, 416)
    for number, state in enumerate((whole, without_counters, rows)):
        backbone = build_backbone(BackboneConfig(name="bn_inception", weights=saved(state, tmp_path / f"{number}.pth")))
        assert same(backbone, state)


def test_rbr_starts_from_the_whole_published_file(tmp_path):
    state = published("resnet18")
    backbone = build_backbone(BackboneConfig(name="resnet18", rbr="released", weights=saved(state, tmp_path / "w.pth")))
    assert same(backbone, state)
    assert "layer4.1.bn2.weight" in state


def test_a_damaged_file_is_refused_with_what_does_not_fit(tmp_path):
    state = dict(published("resnet18"))
    del state["layer1.0.conv1.weight"], state["bn1.running_mean"]
    state |= {"layer9.weight": torch.zeros(1), "conv1.weight": torch.zeros(64, 1, 7, 7)}
    path = saved(state, tmp_path / "w.pth")
    with pytest.raises(ConfigError) as error:
        build_backbone(BackboneConfig(name="resnet18", weights=path))
    assert "2 missing (bn1.running_mean, layer1.0.conv1.weight)" in str(error.value)
    assert "1 unexpected (layer9.weight)" in str(error.value)
    assert "1 wrong shape (conv1.weight (64, 1, 7, 7) for (64, 3, 7, 7))" in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not torch", "not a state dict saved by torch"),
        (b"", r"not a state dict saved by torch \(EOFError\)$"),
        (None, "no such file"),
        ([1, 2], "a mapping of names to tensors"),
        ({}, "a mapping of names to tensors"),
        ({0: torch.zeros(1)}, "a mapping of names to tensors"),
    ],
)
def test_files_that_are_no_weights_are_refused(content, said, tmp_path):
    path = tmp_path / "w.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=said):
        build_backbone(BackboneConfig(name="small_cnn", weights=str(path)))


def test_a_files_hash_is_checked_where_it_is_given(tmp_path):
    path = tmp_path / "w.pth"
    saved(build_backbone(BackboneConfig(name="lenet")).state_dict(), path)
    build_backbone(BackboneConfig(name="lenet", weights=str(path), weights_sha256=sha256(path)))
    with pytest.raises(ConfigError, match="damaged or others"):
        build_backbone(BackboneConfig(name="lenet", weights=str(path), weights_sha256="0" * 64))


# ---------------------------------------------------------------- addresses


class _Server(http.server.BaseHTTPRequestHandler):
    content = b""
    other: ClassVar[dict[str, bytes]] = {}
    num_requests = 0

    def do_GET(self):
        type(self).num_requests += 1
        content = self.other.get(self.path, self.content)
        self.send_response(200 if self.path.partition("?")[0] == "/lenet.pth" or self.path in self.other else 404)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def address(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    buffer = io.BytesIO()
    torch.save(build_backbone(BackboneConfig(name="lenet")).state_dict(), buffer)
    _Server.content, _Server.num_requests = buffer.getvalue(), 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_address_is_fetched_once_and_checked(address):
    config = BackboneConfig(name="lenet", weights=f"{address}/lenet.pth", weights_sha256=hashlib.sha256(_Server.content).hexdigest())
    assert same(build_backbone(config), torch.load(io.BytesIO(_Server.content)))
    build_backbone(config)
    assert _Server.num_requests == 1


def test_the_query_of_a_presigned_address_is_no_part_of_the_stored_name(address, tmp_path, monkeypatch):
    query = f"X-Amz-Credential=AKIA%2F20261128&X-Amz-Signature={'0' * 300}"
    monkeypatch.setitem(_Server.other, f"/lenet.pth?{query}", _Server.content)
    sha256 = hashlib.sha256(_Server.content).hexdigest()
    build_backbone(BackboneConfig(name="lenet", weights=f"{address}/lenet.pth?{query}", weights_sha256=sha256))
    build_backbone(BackboneConfig(name="lenet", weights=f"{address}/lenet.pth", weights_sha256=sha256))
    assert _Server.num_requests == 1
    assert [path.name for path in (tmp_path / "hub" / "checkpoints").iterdir()] == [f"{sha256}-lenet.pth"]


def test_a_download_with_another_hash_is_refused_and_not_kept(address, tmp_path):
    with pytest.raises(ConfigError, match="damaged or others"):
        build_backbone(BackboneConfig(name="lenet", weights=f"{address}/lenet.pth", weights_sha256="0" * 64))
    assert not list((tmp_path / "hub" / "checkpoints").iterdir())


def test_a_folder_that_cannot_keep_a_download_is_named(address, tmp_path, monkeypatch):
    """A read-only home in a container, a mount that is missing: no worker was lost, and a restart does not help."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be stored in .*/file/checkpoints \(Not a directory\); TORCH_HOME names another$"):
        build_backbone(BackboneConfig(name="lenet", weights=f"{address}/lenet.pth", weights_sha256="0" * 64))


def test_a_kept_download_that_was_damaged_later_is_refused(address, tmp_path):
    config = BackboneConfig(name="lenet", weights=f"{address}/lenet.pth", weights_sha256=hashlib.sha256(_Server.content).hexdigest())
    build_backbone(config)
    next((tmp_path / "hub" / "checkpoints").iterdir()).write_bytes(b"cut")
    with pytest.raises(ConfigError, match="damaged or others"):
        build_backbone(config)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/other.pth", "404"),
        (f"/{'a' * 300}.pth", "404"),
        ("/a b.pth", "control characters"),
        ("/gewichte-ü.pth", "can't encode"),
        (None, "cannot be downloaded"),
    ],
)
def test_an_address_that_does_not_answer_is_refused(path, said, address):
    weights = f"{address}{path}" if path else "http://127.0.0.1:1/lenet.pth"
    with pytest.raises(ConfigError, match=said):
        build_backbone(BackboneConfig(name="lenet", weights=weights, weights_sha256="0" * 64))


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("/lenet.pth", None, "damaged or others"),
        ("/other.pth", None, "404"),
        ("/lenet.pth", b"text", "not a state dict"),
        ("/lenet.pth", {"a": torch.ones(1)}, "do not fit"),
    ],
)
def test_no_error_shows_a_password_or_the_signature_of_an_address(path, content, said, address, monkeypatch):
    if isinstance(content, dict):
        saved = io.BytesIO()
        torch.save(content, saved)
        content = saved.getvalue()
    monkeypatch.setattr(_Server, "content", content or _Server.content)
    sha256 = hashlib.sha256(content).hexdigest() if content else "0" * 64
    with pytest.raises(ConfigError, match=said) as raised:
        build_backbone(BackboneConfig(name="lenet", weights=f"{address}{path}?X-Amz-Signature=planted", weights_sha256=sha256))
    assert f"'{address}{path}'" in str(raised.value)
    assert "planted" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"'http://127\.0\.0\.1:1/w\.pth' cannot be downloaded"):
        build_backbone(BackboneConfig(name="lenet", weights="http://ann:planted@127.0.0.1:1/w.pth", weights_sha256=sha256))


@pytest.mark.parametrize("weights", ["http://ü..x/w.pth", "http://[::1/w.pth", "http://host:port/w.pth", "https://"])
def test_what_is_no_address_is_refused(weights, address):
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        build_backbone(BackboneConfig(name="lenet", weights=weights, weights_sha256="0" * 64))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"weights": "https://x/y.pth"}, "give their weights_sha256"),
        ({"weights": "none", "weights_sha256": "0" * 64}, "are no file"),
        ({"weights": "ftp://x/y.pth", "weights_sha256": "0" * 64}, "unknown kind of weights address 'ftp'"),
        ({"weights": "https://x/y.pth", "weights_sha256": "0123"}, "weights_sha256"),
    ],
)
def test_addresses_that_are_not_complete_are_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        build_backbone(parse(BackboneConfig, {"name": "lenet", **values}, "backbone"))


# ---------------------------------------------------------------- published files


def test_every_backbone_with_published_weights_has_a_file_named_by_its_hash():
    assert {name for name in PUBLISHED if not name.startswith(TIMM_PREFIX)} == set(TRAINED_WITH) <= set(BACKBONES)
    for file in PUBLISHED.values():
        assert (file.address is None) == bool(file.how_to_make)
        if file.address:
            assert file.name.partition("-")[2] == f"{file.sha256}.pth"


@pytest.fixture
def offered(address, tmp_path, monkeypatch):
    """Return a function that offers a LeNet from a local server as a published file; the weights folder is empty."""
    monkeypatch.setenv("DML_WEIGHTS", str(tmp_path / "weights"))
    sha256 = hashlib.sha256(_Server.content).hexdigest()

    def offer(**changes):
        file = PublishedFile("lenet.pth", sha256[:9], f"{address}/lenet.pth")
        monkeypatch.setitem(PUBLISHED, "lenet", replace(file, **changes))
        return tmp_path / "weights/lenet.pth"

    return offer


def imagenet(name):
    return build_backbone(BackboneConfig(name=name, weights="imagenet"))


def test_a_published_file_is_fetched_once_and_kept_in_the_weights_folder(offered):
    path = offered()
    assert same(imagenet("lenet"), torch.load(io.BytesIO(_Server.content)))
    imagenet("lenet")
    assert _Server.num_requests == 1
    assert path.read_bytes() == _Server.content


@pytest.mark.parametrize(("name", "reason"), [("gone", "404"), ("damaged", "/damaged.pth has another file")])
def test_a_download_that_fails_names_the_file_its_hash_and_its_place(name, reason, offered, address, monkeypatch):
    monkeypatch.setitem(_Server.other, "/damaged.pth", b"cut")
    path = offered(address=f"{address}/{name}.pth")
    with pytest.raises(ConfigError) as error:
        imagenet("lenet")
    begins = hashlib.sha256(_Server.content).hexdigest()[:9]
    for said in (reason, f"put lenet.pth (SHA-256 begins with {begins}) at {path}"):
        assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert list(path.parent.iterdir()) == []


def test_a_kept_file_with_a_flipped_byte_is_refused_and_named(offered):
    path = offered()
    fetch_published("lenet")
    flip(path)
    os.utime(path, (0, 0))
    with pytest.raises(ConfigError, match=r"lenet\.pth: not lenet\.pth .SHA-256 begins with .* but damaged, or another file .*remove it"):
        imagenet("lenet")
    build_backbone(BackboneConfig(name="lenet"))
    path.unlink()
    imagenet("lenet")


def test_a_file_that_nobody_offers_says_how_it_is_made(offered):
    made = "convert the publisher's checkpoint: python -m convert"
    path = offered(address=None, how_to_make=made)
    with pytest.raises(ConfigError, match=r"nobody offers the file: convert the publisher's checkpoint.* put lenet.pth") as error:
        imagenet("lenet")
    assert str(path) in str(error.value)
    assert how_to_get("lenet").startswith(made)
    path.parent.mkdir()
    path.write_bytes(_Server.content)
    assert same(imagenet("lenet"), torch.load(path))
    flip(path)
    os.utime(path, (0, 0))
    with pytest.raises(ConfigError, match="remove it; convert the publisher's checkpoint"):
        imagenet("lenet")


def test_the_weights_folder_is_that_of_torchs_hub_unless_it_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("DML_WEIGHTS", raising=False)
    for names in ({"TORCH_HOME": str(tmp_path)}, {"XDG_CACHE_HOME": str(tmp_path)}, {}):
        for name in ("TORCH_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        assert published_files.weights_folder() == Path(torch.hub.get_dir()) / "checkpoints"
    monkeypatch.setenv("DML_WEIGHTS", "~/w")
    assert published_files.weights_folder() == Path.home() / "w"


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "vgg16", "bn_inception"])
def test_a_published_file_is_loaded_whole_from_the_weights_folder(name, tmp_path, monkeypatch):
    """All tensors of the file load, with the publisher's names and shapes and including classifiers; the hash is that of the drawn file."""
    monkeypatch.setenv("DML_WEIGHTS", str(tmp_path))
    torch.save(published(name), tmp_path / PUBLISHED[name].name)
    monkeypatch.setitem(PUBLISHED, name, replace(PUBLISHED[name], sha256=sha256(tmp_path / PUBLISHED[name].name)))
    assert is_kept(PUBLISHED[name])
    assert same(imagenet(name), published(name))
