"""/metrics and /healthz over HTTP, on the daemon's event loop."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvtier.errors import AddressInUse


async def start_http(
    address: str, registry: CollectorRegistry, healthy: Callable[[], bool]
) -> web.AppRunner:
    """Serve on "host:port"; the caller cleans the runner up.

    Raises:
        AddressInUse: the port is taken or not ours to take.
    """

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def health(_request: web.Request) -> web.Response:
        ok = healthy()
        return web.Response(text="ok\n" if ok else "unhealthy\n", status=200 if ok else 503)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", health)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, _, port = address.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
    except OSError as error:
        await runner.cleanup()
        raise AddressInUse(
            f"metrics_address {address}: {error.strerror}; choose another or leave it empty"
        ) from error
    return runner
