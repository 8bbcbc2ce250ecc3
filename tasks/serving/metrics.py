"""Metrics of the service for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
REQUESTS = Counter("dml_requests", "Requests that were answered.", ("path", "status"), registry=REGISTRY)
REQUEST_SECONDS = Histogram(
    "dml_request_seconds", "Seconds from a request's headers to its response.", ["path"], buckets=SECONDS, registry=REGISTRY
)
IMAGES = Counter("dml_images", "Images that went through the network.", registry=REGISTRY)
BATCH_IMAGES = Histogram("dml_batch_images", "Images per batch of the network.", buckets=SIZES, registry=REGISTRY)
RETRIES = Counter("dml_retries", "Requests sent to another replica because theirs died.", registry=REGISTRY)
ERRORS = Counter("dml_errors", "Requests that failed because of an error in the service.", registry=REGISTRY)
OPEN = Gauge("dml_requests_open", "Requests in progress.", registry=REGISTRY)
