"""Argo CD's health script, run as Argo CD runs it: Lua 5.1, the object in the global ``obj``."""

from __future__ import annotations

from typing import Final

from lupa.lua51 import LuaRuntime

from e2e.install import ROOT
from e2e.kubectl import Manifest

FOLDER: Final = ROOT / "charts" / "argocd"
SCRIPT: Final = FOLDER / "health.lua"


def read_health(resource: Manifest) -> tuple[str, str]:
    """Status and message that Argo CD shows for the resource."""
    lua = LuaRuntime(unpack_returned_tuples=True, register_eval=False, register_builtins=False)
    lua.globals()["obj"] = lua.table_from(resource, recursive=True)
    found = lua.execute(SCRIPT.read_text())
    return str(found["status"]), str(found["message"])
