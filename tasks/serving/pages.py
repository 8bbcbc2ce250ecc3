"""The pages for a browser: the search at `/`, and the description of the HTTP interface at `/docs`.

Each is one file that loads nothing, with a Content-Security-Policy that allows only its own style and script.
"""

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).parent / "page"
STYLE, SCRIPT = "page.css", "page.js"
BOUNDS = {"minimum": "at least {}", "maximum": "at most {}", "minItems": "at least {}", "maxItems": "at most {}", "default": "default {}"}
Schema = dict[str, Any]  # a part of an OpenAPI description
Field = tuple[str, str, str]  # name, type and meaning of a field of a request or of an object


@cache
def search_page() -> tuple[str, str]:
    """Return the page at `/` and its policy."""
    page = _environment().get_template("search.html").render(style=_text(STYLE), script=_text(SCRIPT))
    return page, _policy(f"script-src {_hash(SCRIPT)}; img-src data: blob:; connect-src 'self'")


def interface_page(description: Schema, address: str) -> tuple[str, str]:
    """Return the page at `/docs` and its policy, from OpenAPI's description; the examples have the service's address."""
    routes = [
        _route(path, method, operation, address)
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    ]
    objects = {name: _fields(schema, is_sent=False) for name, schema in description["components"]["schemas"].items()}
    template = _environment().get_template("interface.html")
    page = template.render(style=_text(STYLE), info=description["info"], routes=routes, objects=objects)
    return page, _policy("img-src data:")


def _route(path: str, method: str, operation: Schema, address: str) -> dict[str, Any]:
    """Return an operation for the page: `fields` has those of each form of its request, `answer` is the type of its response."""
    parameters: list[Schema] = operation.get("parameters", [])
    bodies: Schema = operation.get("requestBody", {}).get("content", {})
    (answer,) = operation["responses"]["200"]["content"].values()
    fields = {"query": [_field(each["name"], each | each["schema"], each["required"]) for each in parameters]} if parameters else {}
    return {
        "title": f"{method.upper()} {path}",
        "summary": operation["description"],
        "needs_token": "security" in operation,
        "fields": fields | {name: _fields(body["schema"]) for name, body in bodies.items()},
        "answer": _type(answer["schema"]),
        "example": _example(address + path, parameters, bodies, "security" in operation),
    }


def _example(address: str, parameters: list[Schema], bodies: Schema, needs_token: bool) -> str:
    """Return a command that sends the required fields of a request."""
    query = "&".join(f"{each['name']}=0" for each in parameters if each["required"])
    files = bodies.get("multipart/form-data", {}).get("schema", {}).get("required", [])
    token = ["-H 'Authorization: Bearer TOKEN'"] if needs_token else []
    return " ".join(["curl", *token, *(f"-F {name}=@a.jpg" for name in files), f"'{address}?{query}'" if query else address])


def _fields(schema: Schema, is_sent: bool = True) -> list[Field]:
    required = schema.get("required", []) if is_sent else []
    return [_field(name, field, name in required) for name, field in schema.get("properties", {}).items()]


def _field(name: str, schema: Schema, is_required: bool) -> Field:
    notes = [schema.get("description", "").rstrip("."), "required" if is_required else ""]
    notes += [text.format(json.dumps(schema[key]).removesuffix(".0")) for key, text in BOUNDS.items() if key in schema]
    return name, _type(schema), "; ".join(filter(None, notes))


def _type(schema: Schema) -> str:
    """Return a JSON type in words: `integer or null`, `Hit[][]`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    if schema["type"] == "array":
        return _type(schema["items"]) + "[]"
    return "file" if schema.get("format") == "binary" else str(schema["type"])


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(FOLDER)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _policy(allowed: str) -> str:
    return f"default-src 'none'; style-src {_hash(STYLE)}; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _hash(name: str) -> str:
    """Return the expression of a policy that allows a file's text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(_text(name).encode()).digest()).decode()}'"


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
