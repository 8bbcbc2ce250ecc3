"""The flow that the schedules of verification start: `tasks.watch.verifying`, with its report on Prefect's page of the flow run."""

import logging

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact
from pydantic import TypeAdapter

from dml_core.errors import DmlError
from flows.reports import artifact_key
from flows.services import ensure_limit, if_server_answers, slots
from tasks.environment import open_project, prefect_server
from tasks.runs.params.file import load_params
from tasks.watch.storage import ACCEPTED
from tasks.watch.summary import as_markdown, first_sentence
from tasks.watch.verifying import VerifyRequest
from tasks.watch.verifying import verify as verify_now

logger = logging.getLogger(__name__)


class NotReproducedError(DmlError):
    """Rows drifted, failed or vanished: the flow run fails, and is not started again."""


def _flow_run_name() -> str:
    """Return the name of a flow run on Prefect's pages: what it verifies."""
    request = TypeAdapter(VerifyRequest).validate_python(runtime.flow_run.parameters.get("request") or {})
    what = ", ".join(request.names) or "everything accepted"
    share = f", {request.share:.0%} of the rows" if request.share < 1 else ""
    budget = f", within {request.budget_minutes:g} min" if request.budget_minutes else ""
    return f"verify {what}{share}{budget}"


@flow(name="verify", flow_run_name=_flow_run_name)
def verify(request: VerifyRequest = VerifyRequest()) -> list[str]:  # noqa: B008  frozen, and Prefect's form shows the defaults
    """Train accepted results again and compare; return a sentence for each reference.

    Args:
        request: what to verify.
    """
    project = open_project()
    if not request.names and not any((project.root / ACCEPTED).glob("[!.]*.json")):
        logger.info("nothing is accepted yet; accept results with: dml accept NAME --why ...")
        return []
    scale = load_params(project.params_file).scale
    if prefect_server() is not None:
        ensure_limit(scale.most_workers, scale.most_workers * scale.concurrent_runs, logger.info)
        logger.info("runs are trained once %d slots of Prefect's limit are free", scale.most_workers)
    # Slots of one run, for all: the runs are of another process, which knows no server.
    verified = verify_now(project, request, logger.info, room=lambda: slots(scale.most_workers, lambda: None))
    sentences = []
    for verification in verified.verifications:
        reference = verified.references.get(verification.name)
        sentences.append(first_sentence(verification, reference))
        key = artifact_key("verification", verification.name)
        with if_server_answers("its page has not all reports"):
            create_markdown_artifact(as_markdown(verification, reference), key=key, description=sentences[-1])
    if verified.has_alarm:
        raise NotReproducedError(" ".join(sentences))
    return sentences
