"""An MCP server on the official SDK, for the tests of the client: on stdio, or with a port on HTTP.

It speaks both revisions of the protocol, unless the first argument names one: 2026-07-28, 2025-11-25, or "ends" for
an old server that ends when it is asked for anything but what it knows.
"""

import json
import os
import signal
import socket
import sys

import anyio
from mcp.server import runner
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool(structured_output=False)
def say(text: str) -> str:
    """Says it back."""
    return text


@server.tool(structured_output=False)
def fail(why: str) -> str:
    """Fails."""
    raise ToolError(why)


@server.tool(structured_output=False)
def picture() -> Image:
    """Gives a picture."""
    return Image(data=b"\x89PNG\r\n\x1a\n", format="png")


@server.tool(structured_output=False)
def long(lines: int) -> str:
    """Gives many lines."""
    return "".join(f"line {n}\n" for n in range(1, lines + 1))


@server.tool()
def called(ctx: Context) -> dict:
    """Tells who calls, and what the server sees of its environment."""
    return {"meta": dict(ctx.request_context.meta or {}), "env": sorted(os.environ), "folder": os.getcwd()}


@server.tool(structured_output=False)
def token(ctx: Context) -> str:
    """Tells the token it was called with."""
    return ctx.request_context.request.headers.get("x-token", "")


@server.tool(structured_output=False)
async def grow(ctx: Context) -> str:
    """Adds a tool."""
    server.add_tool(lambda: "better late than never", name="late", description="Came late.", structured_output=False)
    await ctx.session.send_tool_list_changed()  # older clients
    await ctx.notify_tools_changed()  # newer ones
    return "grown"


@server.tool(structured_output=False)
async def copy(ctx: Context, count: int, folder: str) -> str:
    """Tells how far it is, and ends when there is a file."""
    for done in range(1, count + 1):
        await ctx.report_progress(done, count, f"copied file {done}")
    return await gate(folder)


@server.tool(structured_output=False)
async def gate(folder: str) -> str:
    """Says that it started, and ends when there is a file."""
    with open(os.path.join(folder, "started"), "a") as started:
        started.write("started\n")
    while not os.path.exists(os.path.join(folder, "go")):
        await anyio.sleep(0.01)
    return "passed"


@server.tool(structured_output=False)
def broken() -> str:
    """Over HTTP, calls of it get a status 500."""
    return "not broken"


@server.tool(structured_output=False)
def freeze(folder: str) -> str:
    """Stops the whole server, without ending it."""
    with open(os.path.join(folder, "frozen"), "w"):
        pass
    os.kill(os.getpid(), signal.SIGSTOP)
    return "thawed"


@server.tool(structured_output=False)
async def slow(folder: str) -> str:
    """Never ends by itself."""
    with open(os.path.join(folder, "started"), "w"):
        pass
    try:
        await anyio.sleep_forever()
    finally:
        with open(os.path.join(folder, "cancelled"), "w"):
            pass


@server.tool(structured_output=False)
def die(folder: str = "") -> str:
    """Ends the server in the middle of the call; once, if there is a folder to note it in."""
    if folder:
        with open(os.path.join(folder, "died"), "a") as died:
            died.write("died\n")
            if died.tell() > len("died\n"):
                return "survived"
    print("oh no", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


async def not_known(*_, **__):
    print("I do not know that", file=sys.stderr, flush=True)
    os._exit(1)


ERAS = ("2025-11-25", "2026-07-28", "ends")
era = sys.argv.pop(1) if sys.argv[1:2] and sys.argv[1] in ERAS else "both"
if era == "2025-11-25":
    runner._has_modern_envelope = lambda params: False
elif era == "2026-07-28":
    runner._serve_legacy_stream = not_known
elif era == "ends":
    runner._serve_modern_stream = not_known


class Eras:
    """Refuses what this server does not know, and breaks what is to break."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        body = b""
        while True:
            part = await receive()
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        asked = json.loads(body)
        method, params = asked.get("method"), asked.get("params") or {}
        unknown = {"2025-11-25": "server/discover", "2026-07-28": "initialize"}.get(era)
        if method == unknown or params.get("name") == "broken":
            error = {"jsonrpc": "2.0", "id": asked.get("id"), "error": {"code": -32601, "message": "not known"}}
            status, answer = (400, json.dumps(error).encode()) if method == unknown else (500, b"broken")
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            return await send({"type": "http.response.body", "body": answer})
        given = False

        async def again():
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return await self.app(scope, again, send)


if len(sys.argv) > 1:
    import uvicorn

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[1])))
    listener.listen()  # whoever reads the line may connect at once
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(Eras(server.streamable_http_app()), log_level="error")
    uvicorn.Server(config).run(sockets=[listener])
else:
    server.run()
