"""The web server around the application: its bounds, its beginning and its end."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from accel.system import ENDING
from dist.serve.engine import Engine

IDLE_SECONDS = 15.0  # that a connection may be open without a request on it
MORE_CONNECTIONS = 100  # beside those of the answers that the engine takes
STOPPING = [number for number in ENDING if number.name != "SIGHUP"]  # a terminal may go


class Connection(H11Protocol):
    """Is closed where no request comes, or one comes without end, for twice ``IDLE_SECONDS``."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look now and then."""
        super().connection_made(transport)
        self._seen: object = self
        self._look()

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self.loop.call_later(IDLE_SECONDS, self._look)


def _says_more_than_that_a_client_left(record: logging.LogRecord) -> bool:
    """Say whether a record is worth a line: several pieces may be due to who is no longer there."""
    return "socket.send() raised exception" not in record.getMessage()


class Server(uvicorn.Server):
    """Ends quietly when asked to, with an error for those who wait for an answer.

    Parameters
    ----------
    app : ASGI application
    engine : Engine
        Ends with the server.
    ready : callable
        Is called once connections are taken.
    """

    def __init__(self, app: ASGIApp, engine: Engine, ready: Callable[[], None]) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        logging.getLogger("asyncio").addFilter(_says_more_than_that_a_client_left)
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=engine.capacity + MORE_CONNECTIONS,
                timeout_graceful_shutdown=5,
            )
        )
        self._engine, self._ready = engine, ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let signals end the server, and nothing else."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers, then the connections."""
        self._engine.stop()
        await super().shutdown(sockets)
