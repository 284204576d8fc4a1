"""Copy this package into a folder: how the connector reaches a stock vLLM image.

Runs as init container of an engine pod (``python3 -m bidikv_runtime.install /opt/bidikv/connector``); the engine then
has that folder on PYTHONPATH. Only what runs in an engine's container is copied: the contract, the connector and the
preStop hook, not the router. Beside it lies what a package installer would leave, so that vLLM finds our plugin
(``connector/last_words.py``).

The target appears all at once: the copy is made beside it and renamed into place, so that an interrupted run leaves no
half package, and a repeated one (a restarted init container) replaces it. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parent
PARTS: Final = ("__init__.py", "contract.py", "drain.py", "connector")
METADATA: Final = {
    "METADATA": "Metadata-Version: 2.1\nName: bidikv-connector\nVersion: 1\n",
    "entry_points.txt": (
        "[vllm.general_plugins]\nbidikv-last-words = bidikv_runtime.connector.last_words:install_handler\n"
    ),
}
"""Files of ``METADATA_FOLDER``; ``importlib.metadata`` finds it in any folder on the path."""
METADATA_FOLDER: Final = "bidikv_connector-1.dist-info"
SKIPPED: Final = shutil.ignore_patterns("tests", "__pycache__", "*.pyc", "*.md")


def install(target: Path, package: Path = PACKAGE) -> Path:
    """Copy the package below ``target``, readable by any user. Returns the installed package's folder.

    Raises:
        OSError: the folder cannot be written, or a part is missing.
    """
    target.mkdir(parents=True, exist_ok=True)
    destination = target / package.name
    with tempfile.TemporaryDirectory(dir=target, prefix=".install-") as scratch:
        staged = Path(scratch) / package.name
        staged.mkdir()
        for part in PARTS:
            source = package / part
            if source.is_dir():
                shutil.copytree(source, staged / part, ignore=SKIPPED)
            else:
                shutil.copy2(source, staged / part)
        metadata = Path(scratch) / METADATA_FOLDER
        metadata.mkdir()
        for name, text in METADATA.items():
            (metadata / name).write_text(text)
        # The package first: metadata that names a module which is not there yet would fail vLLM's import of it.
        for new in (staged, metadata):
            _open_for_reading(new)
            if (target / new.name).exists():
                os.rename(target / new.name, Path(scratch) / f"previous-{new.name}")
            os.rename(new, target / new.name)
    return destination


def _open_for_reading(folder: Path) -> None:
    """Engines run as any user; the image's umask must not decide whether they can import."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m bidikv_runtime.install", description=__doc__)
    parser.add_argument("target", type=Path, help="folder that the engine has on PYTHONPATH")
    target = parser.parse_args().target
    try:
        print(f"installed {install(target)}")
    except OSError as error:
        print(f"bidikv_runtime.install: cannot install into {target}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
