#!/usr/bin/env python3
"""A client of Longhaul in Python: submits, follows, approves, and receives a webhook whose signature it checks.

    longhaul up --manifests examples/clients
    pip install standardwebhooks
    LONGHAUL_WEBHOOK_SECRET=$(longhaul webhooks secret) examples/clients/client.py hello

LONGHAUL_SERVER is where the server is, LONGHAUL_TOKEN what to show it when it asks for a token.
"""

import http.client
import json
import os
import queue
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from standardwebhooks.webhooks import Webhook, WebhookVerificationError

SERVER = os.environ.get("LONGHAUL_SERVER", "http://127.0.0.1:7171")


def request(method, path, body=None, headers=None):
    """Opens an answer. A refusal is raised with what is wrong and what to do."""
    headers = dict(headers or {})
    if token := os.environ.get("LONGHAUL_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    asked = urllib.request.Request(SERVER + path, data=data, headers=headers, method=method)
    try:
        return urllib.request.urlopen(asked, timeout=60)
    except urllib.error.HTTPError as error:
        problem = json.load(error)
        raise RuntimeError(f"{problem['code']}: {problem['detail']}") from error


def call(method, path, body=None, headers=None):
    with request(method, path, body, headers) as answer:
        return json.load(answer)


def follow(task):
    """Gives every event of a task once and in order, whatever becomes of the connection."""
    seen = 0
    while True:
        try:
            with request("GET", f"/v1/tasks/{task}/events", headers={"Last-Event-ID": str(seen)}) as stream:
                if stream.status == 204:
                    return
                for line in stream:
                    if line.startswith(b"data:"):
                        event = json.loads(line[5:])
                        seen = event["seq"]
                        yield event
        except (OSError, http.client.HTTPException):
            time.sleep(1)


class Receiver(BaseHTTPRequestHandler):
    """Takes webhooks. Deliveries may come twice: their ids tell."""

    webhook = None
    deliveries = queue.Queue()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            # The library wants the names of headers in small letters.
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.deliveries.put(self.webhook.verify(body, headers))
            self.send_response(204)
        except WebhookVerificationError as error:
            print(f"refused a webhook: {error}", file=sys.stderr)
            self.send_response(401)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def main():
    page = sys.argv[1] if len(sys.argv) > 1 else "hello"
    Receiver.webhook = Webhook(os.environ["LONGHAUL_WEBHOOK_SECRET"])
    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()

    # The key makes it safe to submit again after a broken connection.
    task = call(
        "POST",
        "/v1/tasks",
        {
            "handler": "publish",
            "input": {"page": page},
            "webhook": {"url": f"http://127.0.0.1:{receiver.server_port}/hook"},
        },
        {"Idempotency-Key": str(uuid.uuid4())},
    )
    print("submitted", task["id"], flush=True)

    for event in follow(task["id"]):
        print(event["seq"], event["type"], flush=True)
        if event["type"] == "approval.requested":
            for approval in call("GET", f"/v1/tasks/{task['id']}/approvals")["approvals"]:
                # A person would look at approval["question"] and approval["arguments"] first.
                decision = {"decision": "approve", "digest": approval["digest"]}
                call("POST", f"/v1/tasks/{task['id']}/approvals/{approval['id']}", decision)

    told = Receiver.deliveries.get(timeout=120)
    print("webhook", told["type"], told["data"]["id"], flush=True)
    return 0 if told["data"]["state"] == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
