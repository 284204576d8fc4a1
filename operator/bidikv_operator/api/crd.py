"""The CustomResourceDefinition, assembled from the models and written into the files that users install and read.

``python -m bidikv_operator.api.crd --write`` (in a checkout) writes the CRD and its reference into ``crds/`` and the
chart's copy; ``--check`` fails when one differs from the models. Nothing in those files is edited by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from bidikv_operator import names
from bidikv_operator.api import reference
from bidikv_operator.api.schema import VALIDATIONS, build_open_api_schema
from bidikv_operator.api.v1alpha1 import NAME_RULES, BidiKVInference

FILE_NAME: Final = f"{names.GROUP}_{names.PLURAL}.yaml"
COMMAND: Final = "python -m bidikv_operator.api.crd --write"
_HEADER: Final = f"# Generated from operator/bidikv_operator/api/ by `{COMMAND}`; do not edit.\n"


def build_crd() -> dict[str, Any]:
    """The CRD as the API server takes it. Raises ``SchemaError`` when a model has no faithful schema."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": names.CRD_NAME},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": [names.CATEGORY],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": _build_columns(),
                    "subresources": {
                        "status": {},
                        # /scale acts on decode: it holds the sessions, so it is the role whose size users know.
                        "scale": {
                            "specReplicasPath": ".spec.decode.replicas",
                            "statusReplicasPath": ".status.decode.replicas",
                            "labelSelectorPath": ".status.decode.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": _build_schema()},
                }
            ],
        },
    }


def _build_schema() -> dict[str, Any]:
    schema = build_open_api_schema(BidiKVInference)
    return {
        "description": schema["description"],
        "type": "object",
        "required": schema["required"],
        VALIDATIONS: [dict(rule) for rule in NAME_RULES],
        "properties": {
            "apiVersion": {"description": f"Always {names.API_VERSION}.", "type": "string"},
            "kind": {"description": f"Always {names.KIND}.", "type": "string"},
            # The bound prices the CEL rules over the name; it is Kubernetes' own.
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            **schema["properties"],
        },
    }


def _build_columns() -> list[dict[str, Any]]:
    """Columns of ``kubectl get``; those with a priority show with ``-o wide`` only."""

    def of_ready(key: str) -> str:
        return f'.status.conditions[?(@.type=="{names.READY}")].{key}'

    return [
        {"name": "Ready", "type": "string", "jsonPath": of_ready("status"), "description": "Whether it serves."},
        {"name": "Reason", "type": "string", "jsonPath": of_ready("reason"), "description": "Why it does or does not."},
        *(
            {
                "name": role.capitalize(),
                "type": "integer",
                "jsonPath": f".status.{role}.readyReplicas",
                "description": f"Ready {role} pods.",
            }
            for role in (names.PREFILL, names.DECODE, names.ROUTER)
        ),
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "Fabric", "type": "string", "priority": 1, "jsonPath": ".spec.fabric.type"},
        {
            "name": "Verified",
            "type": "string",
            "priority": 1,
            "jsonPath": f'.status.conditions[?(@.type=="{names.TRANSPORT_VERIFIED}")].status',
            "description": "Whether the engines' reports say that the fabric moves KV as it should.",
        },
        {"name": "Image", "type": "string", "priority": 1, "jsonPath": ".spec.image"},
        {"name": "Endpoint", "type": "string", "priority": 1, "jsonPath": ".status.endpoint"},
        {
            "name": "Message",
            "type": "string",
            "priority": 1,
            "jsonPath": of_ready("message"),
            "description": "What to do.",
        },
    ]


class _Dumper(yaml.SafeDumper):
    """Block style without anchors, list items indented below their key (as ``kubectl`` users write it)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _render(document: dict[str, Any]) -> str:
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return text


def render_crd_file() -> str:
    """The text of ``crds/<group>_<plural>.yaml``."""
    return _HEADER + _render(build_crd())


def render_chart_template() -> str:
    """The same CRD as a Helm template with the switches ``crds.enabled`` and ``crds.keep``.

    Not in the chart's ``crds/`` folder: Helm never upgrades what lies there.
    """
    crd = build_crd()
    spec = _render({"spec": crd["spec"]})
    if "{{" in spec:
        raise ValueError("the CRD contains '{{', which Helm would take for a template; reword the rule or description")
    return (
        "{{- if .Values.crds.enabled }}\n"
        + _HEADER
        + _render({"apiVersion": crd["apiVersion"], "kind": crd["kind"]})
        + "metadata:\n"
        + f"  name: {names.CRD_NAME}\n"
        + "  labels:\n"
        + '    {{- include "bidikv.labels" . | nindent 4 }}\n'
        + "  {{- if .Values.crds.keep }}\n"
        + "  annotations:\n"
        + "    helm.sh/resource-policy: keep\n"
        + "  {{- end }}\n"
        + spec
        + "{{- end }}\n"
    )


def render_files() -> dict[str, str]:
    """Every generated file: path relative to the repository's root -> text."""
    return {
        f"crds/{FILE_NAME}": render_crd_file(),
        f"charts/bidikv/templates/crds/{FILE_NAME}": render_chart_template(),
        f"crds/{reference.FILE_NAME}": reference.render_reference(_build_schema()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """``--write`` or ``--check`` the generated files of a checkout; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bidikv_operator.api.crd", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the files")
    action.add_argument("--check", action="store_true", help="fail when a file differs from the models")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[3], help="the checkout's root")
    options = parser.parse_args(arguments)
    if not (options.root / "crds").is_dir():
        print(f"{options.root} is no checkout of bidikv (it has no folder crds); name one with --root", file=sys.stderr)
        return 2
    stale = []
    for name, text in render_files().items():
        path = options.root / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if options.write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
        else:
            stale.append(name)
    if stale:
        print(f"differs from the models: {', '.join(stale)}; run `{COMMAND}`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
