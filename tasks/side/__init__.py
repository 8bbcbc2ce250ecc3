"""Small measurements beside the pipeline, without Prefect, Ray and MLflow; only `flows.side` imports this."""
