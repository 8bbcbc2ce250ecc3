"""`dml serve`: a trained network, or an index, behind HTTP."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from dml_core.errors import ConfigError
from dml_core.index.index import Index
from dml_core.index.layout import INFO_FILE
from flows.cli.app import app, examples
from flows.cli.search import open_index_model
from flows.cli.session import open_model, open_project, print_lines, say
from tasks.start_times import StartTimes

TOKEN = "DML_SERVE_TOKEN"


@app.command(epilog=examples("dml serve my.index", "dml serve synthetic/softtriple --port 8000"))
def serve(
    what: Annotated[str, typer.Argument(metavar="INDEX|MODEL", help="Folder of an index, or a model as listed by `dml models`.")],
    host: Annotated[str, typer.Option(help="Address to listen on; any other than loopback requires a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8321,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Copies of the network, several on Ray. Default: one per GPU of this machine, or one; on a cluster, one."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Maximum number of images per forward pass; 1 disables batching.")] = 32,
    model: Annotated[str | None, typer.Option(help="Model of the index, if it has moved since the index was built.")] = None,
    token_env: Annotated[str, typer.Option(help="Environment variable with the token that requests must contain.")] = TOKEN,
) -> None:
    """Embed and search over HTTP, with a page to drop an image on.

    Stop it with Ctrl-C.
    """
    if token_env != TOKEN and not os.environ.get(token_env):
        raise ConfigError(f"{token_env}: environment variable not set; set it to the token")
    state = open_project().state  # sets the environment that libraries read when they are imported
    kind = "the service" if replicas in (None, 1) else f"the service with {replicas} replicas"
    starts = StartTimes(state, say)
    print_lines(f"opening {what}{starts.about(kind)}", flush=True)
    with ExitStack() as start:
        start.enter_context(starts.timed(kind))

        def report(address: str) -> None:
            start.close()
            print_lines(f"listening at {address}; end with Ctrl-C", flush=True)

        from tasks.serving.service import needs_ray, run_service

        device = "cpu" if needs_ray(replicas) else None  # Ray's replicas open the network themselves
        index = Index.open(Path(what)) if model is not None or (Path(what) / INFO_FILE).is_file() else None
        folder, network = open_model(what, device) if index is None else open_index_model(index, model, device)
        about = f"an index of {index.num_items:,} images" if index is not None else "embeddings only, no index"
        print_lines(f"{network.title or folder}: {about}{'; starting Ray and the replicas' if needs_ray(replicas) else ''}", flush=True)
        if network.description.transform.crop_to_box:
            say("note: the network was trained on the contents of boxes, which requests cannot name; their images are embedded whole")
        run_service(
            folder,
            network,
            index,
            host=host,
            port=port,
            num_replicas=replicas,
            max_batch=batch,
            token=os.environ.get(token_env) or None,
            report=report,
        )
