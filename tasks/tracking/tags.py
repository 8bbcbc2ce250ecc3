"""Names of the tags that this project sets in MLflow, on runs, logged models and registered models."""


class Tag:
    """A name for each tag; of a training run unless stated otherwise."""

    COMPARISON = "dml.comparison"  # of a parent run: its title
    PART = "dml.part_of"  # title of the parent run
    PARENT = "mlflow.parentRunId"
    IDENTITY = "dml.identity"  # identity of the published run
    TRAINED = "dml.trained"  # identity of the training, which runs of several comparisons may share
    VARIANT = "dml.variant"
    SEED = "dml.seed"
    SETTINGS = "dml.settings"  # with the digest: which runs may be averaged and compared (`tasks.runs.comparable`)
    FOLDER = "dml.dataset_folder"  # of the project that published it: another one has other folders
    DIGEST = "dml.dataset_digest"
    PUBLISHED = "dml.published"  # "true": complete and current
    PROCESS = "dml.process"  # the process that trains it
    EPOCH = "dml.epoch"  # epoch of the scored weights
    OLDER_CODE = "dml.older_code"  # source files that differ from those that made it
    DEFAULTS = "dml.defaults"  # settings with their default value
    NOTE = "mlflow.note.content"  # description, of everything
    ALARM = "dml.alarm"  # of a parent run: alarms of the verification
    SUMMARY = "dml.summary_of"  # of a variant's run: the comparison whose means over seeds it has
    CONTENT = "dml.content"  # of a logged model: hash of its network, code and requirements
    GATE = "dml.gate"  # of a registered version: reason for its promotion
    ATTEMPTS = "dml.attempts"  # of a registered model, followed by the alias: number of promotions that were tried
    LOCKED_UNTIL = "dml.locked_until"  # of a registered model that is a lock
    LOCKED_BY = "dml.locked_by"
