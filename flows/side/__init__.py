"""Pages measured beside the pipeline, without Prefect, Ray and MLflow; nothing else imports this."""
