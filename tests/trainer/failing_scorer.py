"""An HTTP scorer that is down in one step of a run."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def failing_scorer(step: int, tries: int) -> Iterator[str]:
    """Address of a scorer that gives 0, but hangs up on the images of `step` until one was sent `tries` times."""
    seen: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request_id = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request_id"]
            if request_id.startswith(f"s{step}-") and max(seen.values(), default=0) < tries:
                seen[request_id] += 1
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"score": 0}')

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()
