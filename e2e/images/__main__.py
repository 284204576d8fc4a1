"""``python -m e2e.images``: build the images, name them in build/images.json, load them into the local cluster."""

from __future__ import annotations

import json
import sys
import time
from typing import Final

from e2e.cluster import namespaces
from e2e.cluster.containerd import apply_images
from e2e.cluster.paths import Paths, find_external_kubeconfig, find_paths
from e2e.cluster.progress import ClusterError, say
from e2e.cluster.topology import CONTROL_PLANE
from e2e.images.base import apply_base
from e2e.images.catalog import (
    STABLE_NAMES,
    build_engine_image,
    build_operator_image,
    build_references,
    build_runtime_image,
    build_simulated_engine_image,
)
from e2e.images.oci import Image, find_architecture
from e2e.images.python_layers import (
    CHECKOUT,
    SIMULATED_ENGINE,
    apply_dependencies,
    apply_packages_layer,
    apply_simulated_engine_layer,
)

REFERENCES_FILE: Final = CHECKOUT / "build" / "images.json"


def apply_all(paths: Paths) -> dict[str, Image]:
    """All images; what the cache holds is not made again."""
    base = apply_base(paths)
    return {
        "operator": build_operator_image(
            base,
            apply_dependencies(paths, "operator"),
            apply_packages_layer(paths, ("bidikv_operator", "bidikv_runtime")),
        ),
        "runtime": build_runtime_image(
            base, apply_dependencies(paths, "router", "tracing"), apply_packages_layer(paths, ("bidikv_runtime",))
        ),
        "engine": build_engine_image(base),
        "simengine": build_simulated_engine_image(
            base,
            apply_dependencies(paths, distributions=SIMULATED_ENGINE),
            apply_packages_layer(paths, ("bidikv_runtime",)),
            apply_simulated_engine_layer(paths),
        ),
    }


def _load(paths: Paths, images: dict[str, Image], references: dict[str, str]) -> None:
    external = find_external_kubeconfig(paths)
    if external is not None:
        say(f"KUBECONFIG names {external}: push images to a registry that its nodes reach; none is loaded from here.")
        return
    nodes = sorted(name for name in namespaces.observe_units() if name != CONTROL_PLANE)
    if not nodes:
        say("The local cluster is not up: images are built, not loaded (run `make cluster-up`, then `make images`).")
        return
    named = [
        ((references[name], STABLE_NAMES[name]) if name in STABLE_NAMES else (references[name],), image)
        for name, image in images.items()
    ]
    for node in nodes:
        loaded = apply_images(paths.containerd_socket(node), named)
        say(f"{node}: loaded {', '.join(loaded)}" if loaded else f"{node}: has them all")


def main() -> int:
    began = time.monotonic()
    try:
        paths = find_paths()
        images = apply_all(paths)
        references = build_references(images, find_architecture())
        REFERENCES_FILE.parent.mkdir(exist_ok=True)
        REFERENCES_FILE.write_text(json.dumps(references, indent=2) + "\n")
        for name, reference in references.items():
            say(f"{name:9} {reference}")
        _load(paths, images, references)
    except ClusterError as failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        return 1
    say(f"Images ready in {time.monotonic() - began:.1f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
