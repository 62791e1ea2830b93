"""Reads Kubernetes' objects, a line of JSON each, and refuses fields that its API has not, those of another type, and missing ones."""

import json
import re
import sys

from kubernetes.client import models

PLAIN = {"str": str, "int": int, "bool": bool}


def read(kind, value, at):
    """The value as an object of the API's client, which asks for what must be there."""
    if kind in PLAIN:
        if type(value) is not PLAIN[kind]:
            raise ValueError(f"{at} is no {kind}, but {value!r}")
        return value
    if kind == "object":
        return value
    if inner := re.fullmatch(r"List\[(.+)\]", kind):
        return [read(inner[1], one, f"{at}[{i}]") for i, one in enumerate(value)]
    if inner := re.fullmatch(r"Dict\[str, (.+)\]", kind):
        return {key: read(inner[1], one, f"{at}.{key}") for key, one in value.items()}
    model = getattr(models, kind)
    names = {name: own for own, name in model.attribute_map.items()}
    if unknown := value.keys() - names.keys():
        raise ValueError(f"{at} has no field {', '.join(sorted(unknown))}")
    fields = {names[name]: read(model.openapi_types[names[name]], one, f"{at}.{name}") for name, one in value.items()}
    try:
        return model(**fields)
    except ValueError as error:
        raise ValueError(f"{at} lacks a field, or has a wrong one: {error}") from None


for line in sys.stdin:
    found = json.loads(line)
    try:
        read("V1" + found["kind"], found, found["kind"])
    except ValueError as error:
        sys.exit(str(error))
