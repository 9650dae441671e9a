"""An MCP server on the official SDK, for the tests of the client: on stdio, or with a port on HTTP."""

import os
import signal
import socket
import sys

import anyio
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
    await ctx.session.send_tool_list_changed()
    return "grown"


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
def die() -> str:
    """Ends the server in the middle of the call."""
    print("oh no", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if len(sys.argv) > 1:
    import uvicorn

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[1])))
    listener.listen()  # whoever reads the line may connect at once
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(server.streamable_http_app(), log_level="error")
    uvicorn.Server(config).run(sockets=[listener])
else:
    server.run()
