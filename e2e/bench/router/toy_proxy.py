"""The proxy that everybody writes first: FastAPI in front, httpx behind, the body decoded and encoded for each leg.

It follows vLLM's disaggregation examples: prefill with one token, its ``kv_transfer_params`` into the decode leg. It
runs alone, in the peers' environment: ``python toy_proxy.py PORT PREFILL_URL,... DECODE_URL,...``
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import fastapi  # type: ignore[import-not-found, unused-ignore]
import httpx  # type: ignore[import-not-found, unused-ignore]
import uvicorn  # type: ignore[import-not-found, unused-ignore]
from fastapi.responses import (  # type: ignore[import-not-found, unused-ignore]
    Response,
    StreamingResponse,
)

PATH = "/v1/chat/completions"
DROPPED = ("stream_options", "max_completion_tokens")
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def build_app(prefill: list[str], decode: list[str]) -> Any:
    """The application; engines take turns."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    clients = [
        [httpx.AsyncClient(base_url=url, timeout=None, limits=limits) for url in urls] for urls in (prefill, decode)
    ]
    next_prefill, next_decode = (itertools.cycle(pool) for pool in clients)

    async def chat(request: fastapi.Request) -> Any:
        body = await request.json()
        leg = {key: value for key, value in body.items() if key not in DROPPED}
        leg |= {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        prefilled = await next(next_prefill).post(PATH, json=leg)
        prefilled.raise_for_status()
        body["kv_transfer_params"] = prefilled.json()["kv_transfer_params"]
        client = next(next_decode)
        answer = await client.send(client.build_request("POST", PATH, json=body), stream=True)
        kind = answer.headers.get("content-type")
        if body.get("stream"):

            async def relay() -> Any:
                try:
                    async for piece in answer.aiter_bytes():
                        yield piece
                finally:
                    await answer.aclose()

            return StreamingResponse(relay(), answer.status_code, media_type=kind)
        content = await answer.aread()
        await answer.aclose()
        return Response(content, answer.status_code, media_type=kind)

    async def health() -> Any:
        return Response()

    app = fastapi.FastAPI()
    app.add_api_route(PATH, chat, methods=["POST"], response_model=None)
    app.add_api_route("/health", health, response_model=None)
    return app


if __name__ == "__main__":
    number, prefill_urls, decode_urls = sys.argv[1:]
    uvicorn.run(
        build_app(prefill_urls.split(","), decode_urls.split(",")),
        host="127.0.0.1",
        port=int(number),
        log_level="error",
        access_log=False,
    )
