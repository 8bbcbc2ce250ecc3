"""infra/compose.yaml and the Dockerfile name the services, versions and settings of infra/stack.yaml, which runs in the tests."""

import re
from importlib.metadata import version

import pytest
import yaml

from tests.conftest import ROOT

STACK = yaml.safe_load((ROOT / "infra" / "stack.yaml").read_text())
COMPOSE = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "infra" / "Dockerfile").read_text()
# What a machine of one's own has otherwise: addresses, ports, files, and how small the stack of a test is.
OF_PLACE = re.compile(r"host|port|address|temp-dir|object-store-memory|num-cpus|name|allowed-hosts")


def options(command: str) -> dict[str, str]:
    """Options of a command, those of place left out, and what it calls."""
    words = re.split(r"[ =]+(?=-)|(?<=[^ ])[ =]", command)
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith("--") and not OF_PLACE.search(word):
            found[word] = "" if after.startswith("-") else after
    return found


def test_both_have_the_same_services_and_versions() -> None:
    assert set(COMPOSE["services"]) == set(STACK["services"]) - {"s3"}, "S3 is a server of one's own in production"
    assert COMPOSE["services"]["postgres"]["image"] == f"postgres:{STACK['versions']['postgresql']}"
    for name in ("prefect", "mlflow", "ray"):
        assert STACK["versions"][name] == version(name)
        assert re.search(rf'"{name}(\[.*\])?=={re.escape(version(name))}"', (ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", [name for name in STACK["services"] if name not in ("s3", "postgres")])
def test_a_service_has_the_same_options_and_settings(name: str) -> None:
    here, there = STACK["services"][name], COMPOSE["services"][name]
    assert options(here["command"].replace("{bucket}", STACK["bucket"])) == options(there["command"])
    for key, value in here.get("environment", {}).items():
        if "{" not in value:
            assert there["environment"][key] == value, key
    settings = re.findall(r"-c (\w+=\S+)", STACK["services"]["postgres"]["command"])
    shared = [setting for setting in settings if "{" not in setting and not setting.endswith("=") and not setting.startswith("listen")]
    assert all(f"-c {setting}" in COMPOSE["services"]["postgres"]["command"] for setting in shared)


def test_who_uses_the_servers_is_told_the_same_things() -> None:
    own = {"PREFECT_LOCAL_STORAGE_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}  # one machine's
    here = {"RAY_AUTH_TOKEN" if name == "RAY_AUTH_TOKEN_PATH" else name for name in STACK["clients"]} - own
    assert set(COMPOSE["x-clients"]) == here
    for name in ("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "RAY_AUTH_MODE", "AWS_DEFAULT_REGION"):
        assert COMPOSE["x-clients"][name] == STACK["clients"][name]


def test_the_image_has_the_environment_of_every_service() -> None:
    for name, value in STACK["common"].items():
        assert f"{name}={value}" in DOCKERFILE


def test_no_page_is_open_to_the_network_and_no_secret_is_in_the_file() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN$|CONNECTION_URL|BACKEND_STORE", key):
                assert re.search(r"\$\{\w+:\?\}", value), key
