"""Agent B of the tests: another process that watches a task's state by MCP, with the official SDK, and adds to it.

Takes one argument, JSON: {"server": URL or {"command", "args", "env"}, "mode", "uri", "task_id", "last"}. Says "watching" on a line when it
watches, and at the end on another what it has seen.
"""

import json
import sys

import anyio
from mcp import Client
from mcp.client.stdio import StdioServerParameters

asked = json.loads(sys.argv[1])
server = asked["server"] if isinstance(asked["server"], str) else StdioServerParameters(**asked["server"])
uri, task = asked["uri"], asked["task_id"]
told, first, changed = [], anyio.Event(), anyio.Event()


async def hear(message):
    if getattr(message, "method", None) == "notifications/resources/updated":
        version = (message.params.meta or {}).get("dev.longhaul/version")
        assert message.params.uri == uri, message
        if version is not None:
            told.append(version)
            first.set()
        if version == asked["last"]:
            changed.set()


async def read(client):
    result = await client.read_resource(uri, cache_mode="bypass")
    return json.loads(result.contents[0].text)


async def patch(client, version, key):
    fact = {"key": key, "value": "from B", "source": "agent B"}
    arguments = {"task_id": task, "version": version, "patch": {"add_facts": [fact]}}
    result = await client.call_tool("patch_state", arguments)
    return result.is_error, json.loads(result.content[0].text)


async def work(client):
    print("watching", flush=True)
    with anyio.fail_after(60):
        await changed.wait()
    seen = await read(client)
    stale_refused, stale = await patch(client, seen["version"] - 1, "stale")
    refused, patched = await patch(client, seen["version"], "advice")
    tools = [tool.name for tool in (await client.list_tools()).tools]
    report = {
        "revision": client.protocol_version,
        "told": told,
        "seen": seen,
        "stale": stale if stale_refused else None,
        "patched": None if refused else patched,
        "after": await read(client),
        "tools": tools,
    }
    print(json.dumps(report), flush=True)


async def main():
    async with Client(server, mode=asked["mode"], message_handler=hear) as client:
        if client.protocol_version < "2026-07-28":
            await client.subscribe_resource(uri)
            await work(client)
        else:
            async with client.listen(resource_subscriptions=[uri]):
                # Who listens is told how things stand, and from then on of every change.
                with anyio.fail_after(60):
                    await first.wait()
                await work(client)


anyio.run(main)
