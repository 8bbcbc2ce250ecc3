"""infra/compose.yaml, infra/kubernetes and the Dockerfile use the services, versions and settings of infra/stack.yaml, which tests run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import RelatedResource, Resource

from tasks.environment import Project, set_environment
from tasks.stack.settings import load_stack
from tests.conftest import ROOT

STACK = yaml.safe_load((ROOT / "infra" / "stack.yaml").read_text())
COMPOSE = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text())
AUTOMATIONS = yaml.safe_load((ROOT / "infra" / "automations.yaml").read_text())["automations"]
DOCKERFILE = (ROOT / "infra" / "Dockerfile").read_text()
IGNORED = [line for line in (ROOT / "infra" / "Dockerfile.dockerignore").read_text().splitlines() if not line.startswith("#")]
KUBERNETES = ROOT / "infra" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
RAYJOB = yaml.safe_load((KUBERNETES / "job" / "rayjob.yaml").read_text())
OBJECTS = [entry for name in KUSTOMIZATION["resources"] for entry in yaml.safe_load_all((KUBERNETES / name).read_text())]
NAMED = {(entry["kind"], entry["metadata"]["name"]): entry for entry in OBJECTS}
CLUSTER = NAMED["RayCluster", "dml"]["spec"]
GROUPS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}
# Options that differ on a single machine: addresses, ports, files, the small size of a test's stack, one log monitor for all nodes.
OF_PLACE = re.compile(r"host|port|address|temp-dir|object-store-memory|num-[cg]pus|name|allowed-hosts|log-monitor")
# KubeRay checks the head and submits jobs through the dashboard, and starts the autoscaler next to the head itself; the image's
# environment disables usage statistics.
OF_KUBERAY = {"--head", "--block", "--include-dashboard", "--no-monitor", "--disable-usage-stats"}
# Fields of KubeRay 1.6's RayCluster and RayJob that are used here, from its reference; no available package has its schemas.
RAY_FIELDS = {
    "RayJob": {"entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit", "rayClusterSpec"},
    "RayCluster": {"rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "workerGroupSpecs"},
    "authOptions": {"mode", "secretName"},
    "autoscalerOptions": {"idleTimeoutSeconds", "resources"},
    "headGroupSpec": {"serviceType", "rayStartParams", "template"},
    "workerGroupSpec": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def options(command: str) -> dict[str, str]:
    """Return the options of a command, or of a script's last line, without those of OF_PLACE."""
    words = re.split(r"[ =]+(?=-)|(?<=[^ ])[ =]", re.split(r"[;&]\s+exec ", command.strip().rstrip("'"))[-1])
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith("--") and not OF_PLACE.search(word):
            found[word] = "" if after.startswith("-") else after
    return found


def container(name: str) -> dict[str, Any]:
    """Return a service's only container in Kubernetes."""
    template = {
        "ray-head": CLUSTER["headGroupSpec"]["template"],
        "ray-node-1": GROUPS["cpu"]["template"],
        "ray-node-2": GROUPS["cpu"]["template"],
    }.get(name)
    if template is None:
        template = next(NAMED[kind, name]["spec"]["template"] for kind in ("Deployment", "StatefulSet") if (kind, name) in NAMED)
    (found,) = template["spec"]["containers"]
    return dict(found)


def environment(name: str) -> dict[str, str]:
    """Return a container's literal environment variables, with those of ConfigMaps but not of Secrets."""
    own = container(name)
    maps = [NAMED["ConfigMap", entry["configMapRef"]["name"]]["data"] for entry in own.get("envFrom", ()) if "configMapRef" in entry]
    return {key: value for data in maps for key, value in data.items()} | {
        entry["name"]: entry["value"] for entry in own.get("env", ()) if "value" in entry
    }


def templates() -> list[dict[str, Any]]:
    """Return every pod template, including those of the Ray clusters."""
    found = [entry["spec"]["template"] for entry in OBJECTS if "template" in entry.get("spec", {})]
    for spec in (CLUSTER, RAYJOB["spec"]["rayClusterSpec"]):
        found += [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    return found


# ---------------------------------------------------------------- both


def test_all_have_the_same_services_and_versions() -> None:
    services = set(STACK["services"]) - {"s3"}  # S3 is a server of one's own in production
    assert set(COMPOSE["services"]) == services | {"prefect-setup"}
    for name in services:
        assert container(name)["image"] == COMPOSE["services"][name]["image"], name
    assert COMPOSE["services"]["postgres"]["image"] == f"postgres:{STACK['versions']['postgresql']}"
    for name in ("prefect", "mlflow", "ray"):
        assert STACK["versions"][name] == version(name)
        assert re.search(rf'"{name}(\[.*\])?=={re.escape(version(name))}"', (ROOT / "pyproject.toml").read_text())
    assert [spec["rayVersion"] for spec in (CLUSTER, RAYJOB["spec"]["rayClusterSpec"])] == [version("ray")] * 2
    assert GROUPS["cpu"]["minReplicas"] == sum(name.startswith("ray-node") for name in STACK["services"])


@pytest.mark.parametrize("name", [name for name in STACK["services"] if name not in ("s3", "postgres")])
def test_a_service_has_the_same_options_and_settings(name: str) -> None:
    here, there = STACK["services"][name], COMPOSE["services"][name]
    wanted = options(here["command"].replace("{bucket}", STACK["bucket"]))
    # Elsewhere a client may reach MLflow's server but another bucket than it: files go through the server there.
    assert bool(wanted.pop("--default-artifact-root", None)) == (name == "mlflow")
    assert wanted == options(there["command"])
    if name.startswith("ray-"):
        assert set(wanted) <= OF_KUBERAY
        assert "command" not in container(name), "KubeRay writes `ray start` itself"
    else:
        assert wanted == options(" ".join(container(name)["command"]))
    for key, value in here.get("environment", {}).items():
        if "{" not in value:
            assert there["environment"][key] == environment(name)[key] == value, key


def test_postgresql_has_the_same_settings() -> None:
    command = STACK["services"]["postgres"]["command"].rstrip("'")
    settings = re.findall(r"-c (\w+=\S*)", command)
    shared = [setting for setting in settings if "{" not in setting and not setting.endswith("=") and not setting.startswith("listen")]
    assert shared
    assert all(f"-c {setting}" in COMPOSE["services"]["postgres"]["command"] for setting in shared)
    assert all(setting in container("postgres")["args"] for setting in shared)
    assert {environment("postgres")["POSTGRES_DB"], "mlflow"} == set(re.findall(r"CREATE DATABASE (\w+)", command))
    assert NAMED["ConfigMap", "postgres-databases"]["data"]["databases.sql"] == COMPOSE["configs"]["databases"]["content"]


def test_who_uses_the_servers_is_told_the_same_things() -> None:
    own = {"PREFECT_LOCAL_STORAGE_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}  # one machine's
    here = set(STACK["clients"]) - own
    assert set(COMPOSE["x-clients"]) == here
    told = environment("prefect-worker")
    secret = {"RAY_AUTH_TOKEN", "PREFECT_API_AUTH_STRING", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert here - secret <= set(told)
    for name in ("RAY_AUTH_MODE", "AWS_DEFAULT_REGION"):
        assert COMPOSE["x-clients"][name] == told[name] == STACK["clients"][name]
    for name in ("DML_STORE", "MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        assert COMPOSE["x-clients"][name] == told[name]
    for name, service in (("MLFLOW_TRACKING_URI", "mlflow"), ("PREFECT_API_URL", "prefect-server")):
        ports = NAMED["Service", service]["spec"]["ports"]
        assert f"//{service}:{ports[0]['port']}" in told[name]
    assert told["RAY_ADDRESS"] == f"{NAMED['RayCluster', 'dml']['metadata']['name']}-head-svc:6379"


def test_the_image_has_the_environment_of_every_service() -> None:
    for name, value in STACK["common"].items():
        assert f"{name}={value}" in DOCKERFILE


def test_no_page_is_open_to_the_network_and_no_secret_is_in_the_file() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN$|AUTH_STRING", key):
                assert re.search(r"\$\{\w+:\?\}", value), key


def test_prefect_s_server_has_a_password_that_all_its_clients_are_given() -> None:
    client, server = "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"
    assert STACK["services"]["prefect-server"]["environment"][server] == STACK["clients"][client] == "dml:{secrets[prefect]}"
    assert COMPOSE["services"]["prefect-server"]["environment"][server] == COMPOSE["x-clients"][client] == f"${{{client}:?}}"
    (own,) = [entry["valueFrom"]["secretKeyRef"] for entry in container("prefect-server")["env"] if entry["name"] == server]
    assert own == {"name": "dml-prefect", "key": client}
    assert f"dml-prefect --from-literal={client}=dml:" in (KUBERNETES / "kustomization.yaml").read_text()
    for used in (used for template in templates() for used in template["spec"]["containers"]):
        named = [entry[kind]["name"] for entry in used.get("envFrom", ()) for kind in entry]
        assert ("dml-clients" in named) == ("dml-prefect" in named), used["name"]


@pytest.mark.parametrize("name", ["prefect-server", "mlflow"])
def test_a_database_s_password_is_in_no_address_in_which_its_letters_would_have_a_meaning(name: str) -> None:
    own = container(name)
    (secret,) = [entry["valueFrom"]["secretKeyRef"]["key"] for entry in own["env"] if entry["name"] == "PGPASSWORD"]
    assert secret == "POSTGRES_PASSWORD"
    assert COMPOSE["services"][name]["environment"]["PGPASSWORD"] == "${POSTGRES_PASSWORD:?}"
    assert STACK["services"][name]["environment"]["PGPASSWORD"] == "{secrets[postgres]}"
    for variables in (environment(name), COMPOSE["services"][name]["environment"], STACK["services"][name]["environment"]):
        (address,) = [value for value in variables.values() if value.startswith("postgresql+")]
        assert "//dml@" in address


def test_a_worker_of_prefect_ends_with_its_ray_node(tmp_path: Path) -> None:
    """In both scripts `ray` and `prefect` are replaced: the raylet ends after a second, and so must the main process."""
    raylet = Path(shutil.copy("/bin/sleep", tmp_path / "raylet-of-test"))
    compose = shlex.split(COMPOSE["services"]["prefect-worker"]["command"])[-1]
    for script in (compose, container("prefect-worker")["command"][-1]):
        script = script.replace("$$", "$").replace("sleep 5;", "sleep 0.1;")  # as compose and Kubernetes do, and looks more often
        with_node = re.sub(r"ray start [^;\n]*", f"{raylet} 1 &\n", script.strip().replace("raylet", raylet.name)).replace("&\n;", "&\n")
        stand_in = re.sub(r"exec prefect .*", "exec sleep 60", with_node)
        assert stand_in.count(str(raylet)) == 1
        assert "sleep 60" in stand_in
        assert subprocess.run(["bash", "-ec", stand_in], check=False, timeout=30).returncode == -15, stand_in
        without_node = stand_in.replace(f"{raylet} 1 &", "false")
        assert subprocess.run(["bash", "-ec", without_node], check=False, timeout=30).returncode == 1, "it does not start without one"


@pytest.mark.parametrize(("cores", "each"), [(1, 1), (3, 1), (16, 8)])
def test_the_ray_nodes_of_one_host_share_its_cores_in_compose_as_in_the_local_stack(cores: int, each: int, tmp_path: Path) -> None:
    for name, line in (("nproc", f"echo {cores}"), ("ray", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("ray-node-1", "ray-node-2"):
        assert "--num-cpus={share}" in STACK["services"][name]["command"]
        command = shlex.split(COMPOSE["services"][name]["command"].replace("$$", "$"))
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        told = subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout
        assert f" --num-cpus={each} " in told


# ---------------------------------------------------------------- files that a flow needs in the image


def copied() -> set[str]:
    """Return the project's paths in the image."""
    return {path for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for path in line.split()}


def test_the_image_has_what_dvc_s_stages_depend_on() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"].values()
    needed = {dependency.partition("/")[0] for stage in stages for dependency in stage["do"]["deps"]} - {"data", "${item.raw}"}
    assert needed >= {"dml_core", "flows", "tasks"}
    assert needed | {"params.yaml", "dvc.yaml", ".dvcignore", ".dvc/config"} <= copied()
    assert all((ROOT / path).exists() for path in copied())
    sent = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert IGNORED[0] == "*"
    assert {path.removesuffix("/requirements.lock") for path in copied()} == sent, "what is not named is not sent to the build"


def test_what_a_flow_writes_belongs_to_the_image_s_user_and_outlives_the_container() -> None:
    (owned,) = re.findall(r"&& chown dml:dml (.+)$", DOCKERFILE, re.MULTILINE)
    lasting = {"data", "state", "results"}
    assert lasting | {".dvc/tmp"} <= set(owned.split())
    assert "ln --symbolic state/dvc.lock dvc.lock" in DOCKERFILE
    assert "dir = /srv/dml/state/dvc-cache" in DOCKERFILE
    places = {f"/srv/dml/{folder}" for folder in lasting}
    volumes = {volume.partition(":")[2] for volume in COMPOSE["services"]["prefect-worker"]["volumes"] if ":" in volume}
    assert volumes == places
    kept = {mount["mountPath"] for mount in container("prefect-worker")["volumeMounts"] if mount["name"] == "work"}
    assert kept == places


def places_of(service: dict[str, Any]) -> set[str]:
    """Return where a service of compose.yaml can write."""
    return {*service.get("tmpfs", ()), *(volume.rpartition(":")[2] for volume in service.get("volumes", ()))}


def test_only_what_is_written_can_be_written() -> None:
    for name, service in COMPOSE["services"].items():
        if name == "postgres":  # the image's own start changes its user
            continue
        assert (service["read_only"], service["cap_drop"], service["security_opt"]) == (True, ["ALL"], ["no-new-privileges:true"]), name
        assert {"/home/dml", "/tmp"} <= places_of(service), name
    assert {"/srv/dml/.dvc/tmp", "/srv/dml/state"} <= places_of(COMPOSE["services"]["prefect-worker"])
    for template in templates():
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for own in template["spec"]["containers"]:
            assert own["securityContext"]["readOnlyRootFilesystem"] is True
            mounts = {mount["mountPath"]: mount["name"] for mount in own["volumeMounts"]}
            assert "/tmp" in mounts
            assert "/home/dml" in mounts or own["name"] == "postgres"
            assert "/srv/dml/state" in mounts or own["name"] not in ("ray-node", "prefect-worker")
            assert set(mounts.values()) <= volumes | {"data"}, "data: the claim of postgres"
    (head,) = RAYJOB["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {f"/srv/dml/{name}" for name in ("state", "data", "results", ".dvc/tmp")} <= {
        mount["mountPath"] for mount in head["volumeMounts"]
    }


def test_the_image_s_lock_is_the_project_s_without_what_only_development_needs() -> None:
    whole, own = (
        dict(re.findall(r"^(\S+==\S+)(.*(?:\n    .*)*)", (ROOT / path).read_text(), re.MULTILINE))
        for path in ("requirements.lock", "infra/requirements.lock")
    )
    assert own.items() <= whole.items(), "make lock"
    names = {pin.partition("==")[0] for pin in own}
    assert not names & {"pytest", "ruff", "moto", "supervisor", "playwright", "mkdocs"}
    wanted = {re.split(r"[\[=<>~ ;]", entry)[0] for entry in requires("dml-repro") or ()}
    assert wanted - {"dml-core"} <= names
    (left_out,) = re.findall(r'--build-arg LEFT_OUT="(.+)"', DOCKERFILE)
    assert set(left_out.split()) <= names
    assert re.findall(r"UV_VERSION[:=]+ ?([\d.]+)", DOCKERFILE) == re.findall(r"UV_VERSION := ([\d.]+)", (ROOT / "Makefile").read_text())


# ---------------------------------------------------------------- Kubernetes only


def test_every_object_fits_its_schema() -> None:
    """Pods of the Ray clusters are validated as pods, because the available schemas cover only Kubernetes' own kinds."""
    newest = kubernetes_validate.latest_version()
    own = [entry for entry in OBJECTS if not entry["apiVersion"].startswith("ray.io/")]
    assert {entry["kind"] for entry in own} >= {"Deployment", "StatefulSet", "Service", "ConfigMap", "Job", "NetworkPolicy"}
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of-a-template"}, "spec": found["spec"]} for found in templates()]
    for entry in own + pods:
        kubernetes_validate.validate(json.loads(json.dumps(entry)), newest, strict=True)
    wrong = dict(pods[0]["spec"], containers=[dict(pods[0]["spec"]["containers"][0], imagee="x")])
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pods[0] | {"spec": wrong}, newest, strict=True)


def test_the_ray_objects_have_fields_that_kuberay_knows() -> None:
    assert set(RAYJOB["spec"]) <= RAY_FIELDS["RayJob"]
    assert [entry["apiVersion"] for entry in (NAMED["RayCluster", "dml"], RAYJOB)] == ["ray.io/v1"] * 2
    for spec in (CLUSTER, RAYJOB["spec"]["rayClusterSpec"]):
        assert set(spec) <= RAY_FIELDS["RayCluster"]
        assert spec["authOptions"] == {"mode": "token", "secretName": "dml-ray"}
        assert set(spec.get("autoscalerOptions", {})) <= RAY_FIELDS["autoscalerOptions"]
        assert set(spec["headGroupSpec"]) <= RAY_FIELDS["headGroupSpec"]
        assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}, "texts, and nothing runs on the head"
        for group in spec["workerGroupSpecs"]:
            assert set(group) <= RAY_FIELDS["workerGroupSpec"]
            assert 1 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert CLUSTER["enableInTreeAutoscaling"] is True
    assert GROUPS["gpu"]["maxReplicas"] > GROUPS["gpu"]["minReplicas"]


def test_a_gpu_group_asks_for_a_gpu_in_an_image_that_can_use_it() -> None:
    for spec in (CLUSTER, RAYJOB["spec"]["rayClusterSpec"]):
        (group,) = [group for group in spec["workerGroupSpecs"] if group["groupName"] == "gpu"]
        (node,) = group["template"]["spec"]["containers"]
        assert node["image"] == "dml-repro:cuda"
        assert node["resources"]["limits"]["nvidia.com/gpu"] == node["resources"]["requests"]["nvidia.com/gpu"] == 1
    assert "--tag dml-repro:cuda ." in DOCKERFILE, "with all packages of the lock"
    assert "NVIDIA_VISIBLE_DEVICES=all" in DOCKERFILE


def test_a_rebuilt_image_is_pulled_and_deployed_again() -> None:
    """The tags stay: without these, nodes keep the former image, and a Job that is there the former deployments."""
    for own in (own for template in templates() for own in template["spec"]["containers"]):
        assert own.get("imagePullPolicy") == ("Always" if own["image"].startswith("dml-repro:") else None), own["name"]
    assert NAMED["Job", "prefect-setup"]["spec"]["ttlSecondsAfterFinished"] > 0


def test_a_server_is_asked_for_its_health_where_the_stack_asks_it() -> None:
    for name in ("prefect-server", "mlflow", "prefect-worker"):
        assert container(name)["readinessProbe"]["httpGet"]["path"] == STACK["services"][name]["health"]


def test_the_prefect_server_is_set_up_as_the_stack_s_is() -> None:
    (job,) = NAMED["Job", "prefect-setup"]["spec"]["template"]["spec"]["containers"]
    wanted = [line.replace("{python}", "python") for line in STACK["services"]["prefect-server"]["setup"]]
    assert job["command"][-1].strip().splitlines() == wanted
    setup = COMPOSE["services"]["prefect-setup"]
    assert shlex.split(setup["command"]) == ["bash", "-ec", "; ".join(wanted)]
    assert setup["restart"] == "on-failure"
    assert COMPOSE["services"]["prefect-worker"]["depends_on"]["prefect-setup"] == {"condition": "service_completed_successfully"}


def test_secrets_are_referred_to_and_services_are_inside_alone() -> None:
    assert not [entry for entry in OBJECTS if entry["kind"] in ("Secret", "Ingress")]
    text = "".join(path.read_text() for path in KUBERNETES.rglob("*.yaml"))
    named = set(re.findall(r"(?:secretRef|secretKeyRef): \{name: ([\w-]+)", text)) | {CLUSTER["authOptions"]["secretName"]}
    assert named == set(re.findall(r"create secret generic ([\w-]+)", text))
    for template in templates():
        for entry in (entry for own in template["spec"]["containers"] for entry in own.get("env", ())):
            if re.search("PASSWORD|SECRET|TOKEN$|KEY|AUTH_STRING", entry["name"]):
                assert "secretKeyRef" in entry["valueFrom"], entry
    for entry in OBJECTS:
        if entry["kind"] == "Service":
            assert entry["spec"].get("type", "ClusterIP") == "ClusterIP"
    for spec in (CLUSTER, RAYJOB["spec"]["rayClusterSpec"]):
        assert spec["headGroupSpec"].get("serviceType", "ClusterIP") == "ClusterIP"
    policy = NAMED["NetworkPolicy", "dml-alone"]["spec"]
    assert policy["podSelector"] == {}
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": {}}]}], "pods of no other namespace"


def test_of_other_namespaces_only_the_operator_s_own_reaches_ray_s_pods_alone() -> None:
    """A label alone would not do: who can start a pod in any namespace can give it that."""
    policy = NAMED["NetworkPolicy", "ray-operator"]["spec"]
    assert policy["podSelector"] == {"matchExpressions": [{"key": "ray.io/cluster", "operator": "Exists"}]}
    (source,) = policy["ingress"][0]["from"]
    (namespace,) = source["namespaceSelector"]["matchLabels"].items()
    assert namespace == ("kubernetes.io/metadata.name", "kuberay-operator")
    assert namespace[1] in (KUBERNETES / "network.yaml").read_text().partition("apiVersion")[0]


def test_a_drained_node_ends_no_flow_and_one_ray_node_at_a_time() -> None:
    budgets = {name: entry["spec"] for (kind, name), entry in NAMED.items() if kind == "PodDisruptionBudget"}
    allowed = {name: spec["maxUnavailable"] for name, spec in budgets.items()}
    assert allowed == {"ray-nodes": 1, "ray-head": 0, "prefect-worker": 0}
    labels = NAMED["Deployment", "prefect-worker"]["spec"]["template"]["metadata"]["labels"]
    assert budgets["prefect-worker"]["selector"]["matchLabels"].items() <= labels.items()
    for name in ("ray-nodes", "ray-head"):
        assert budgets[name]["selector"]["matchLabels"]["ray.io/cluster"] == NAMED["RayCluster", "dml"]["metadata"]["name"]


def test_kueue_s_overlay_changes_the_ray_cluster_only() -> None:
    overlay = yaml.safe_load((ROOT / "infra/kueue/kustomization.yaml").read_text())
    queue = yaml.safe_load((ROOT / "infra/kueue/queue.yaml").read_text())
    assert overlay["resources"] == ["../kubernetes", "queue.yaml"]
    (patch,) = overlay["patches"]
    assert patch["target"] == {"kind": "RayCluster", "name": "dml"}
    changed = yaml.safe_load(patch["patch"])
    assert changed["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": queue["metadata"]["name"]}
    assert changed["spec"] == {"enableInTreeAutoscaling": False, "autoscalerOptions": None}


def test_no_pod_runs_as_root_or_may_become_it() -> None:
    for template in templates():
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for own in template["spec"]["containers"]:
            assert own["securityContext"]["allowPrivilegeEscalation"] is False
            assert own["resources"]["limits"]


@pytest.mark.parametrize("name", [".env", "infra/.env"])
def test_the_file_with_the_passwords_stays_out_of_git_and_of_the_image(name: str) -> None:
    assert subprocess.run(["git", "check-ignore", "--quiet", "--no-index", name], cwd=ROOT, check=False).returncode == 0
    assert (ROOT / "infra/Dockerfile.dockerignore").read_text().splitlines()[-1] == "**/.env", "the last line that fits decides"
    for path in ("infra/compose.yaml", "docs/how-to/nightly-runs.md"):  # without the option, the folder of the first --file is searched
        (given,) = re.findall(r"^(?:# +)?docker compose (.+) up", (ROOT / path).read_text(), re.MULTILINE)
        assert given == "--env-file .env --file infra/compose.yaml"


def test_make_refuses_an_environment_of_another_python(tmp_path: Path) -> None:
    """Python's venv would keep the interpreter that is there, also a link to one that was removed."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    link = tmp_path / f".venv/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    link.parent.mkdir(parents=True)
    (tmp_path / ".venv/pyvenv.cfg").touch()

    def make() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", "--silent", "python", f"PYTHON={sys.executable}"], cwd=tmp_path, check=False, capture_output=True, text=True
        )

    assert "remove it first: rm -r .venv" in make().stdout
    link.symlink_to(tmp_path / "removed")
    assert make().returncode == 2
    link.unlink()
    link.symlink_to(sys.executable)
    assert (make().returncode, make().stdout) == (0, "")
    (other := link.with_name("uname")).write_text("#!/bin/sh\necho Linux aarch64\n")  # PATH begins with this folder
    other.chmod(0o755)
    assert make().stdout == "error: requirements.lock is for Linux on x86-64\n"


def test_make_clean_leaves_the_raw_data(tmp_path: Path) -> None:
    """Copies of papers' datasets take hours to download again."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("data/raw/cub200", "data/packed/cub200", "state", "build"):
        (tmp_path / folder).mkdir(parents=True)
    subprocess.run(["make", "--silent", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert {path.name for path in tmp_path.rglob("*")} == {"Makefile", "data", "raw", "cub200"}


def test_a_flow_run_s_process_begins_with_what_the_project_sets_too_late_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = yaml.safe_load((ROOT / "infra/prefect.yaml").read_text())["definitions"]["work_pool"]["job_variables"]["env"]
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in given})
    set_environment(Project(tmp_path, tmp_path / "state", str(tmp_path / "store"), "sqlite:///x"))
    assert given.items() <= os.environ.items()
    (dead,) = [found for found in AUTOMATIONS if found["name"] == "crash-dead-flows"]
    assert 3 * int(given["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) <= dead["trigger"]["within"]


def test_a_flow_run_that_crashed_is_retried_twice_at_most_and_not_if_it_never_began() -> None:
    (trigger,) = [found["trigger"] for found in AUTOMATIONS if found["name"] == "retry-crashed-flows"]
    deployment = RelatedResource({"prefect.resource.id": "prefect.deployment.1", "prefect.resource.role": "deployment"})

    def is_retried(run_count: int) -> bool:
        crashed = Resource({"prefect.resource.id": "prefect.flow-run.1", "prefect.run-count": str(run_count)})
        return EventTrigger.model_validate(trigger).covers_resources(crashed, [deployment])

    assert [is_retried(run_count) for run_count in range(5)] == [False, True, True, False, False]


def test_what_loads_the_automations_has_the_address_that_they_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = {action["webhook"] for automation in AUTOMATIONS for action in automation["actions"] if "webhook" in action}
    assert named == {"DML_WEBHOOK"}
    monkeypatch.setenv("DML_WEBHOOK", "http://127.0.0.1:9/alarms")
    project = Project(ROOT, tmp_path / "state", str(tmp_path / "store"), "sqlite:///x")
    assert load_stack(project).environment["DML_WEBHOOK"] == "http://127.0.0.1:9/alarms"
    assert COMPOSE["services"]["prefect-setup"]["environment"]["DML_WEBHOOK"] == "${DML_WEBHOOK:-}"
    (job,) = NAMED["Job", "prefect-setup"]["spec"]["template"]["spec"]["containers"]
    assert {entry["name"] for entry in job["env"]} == named
