"""A Hugging Face hub on loopback, as far as `huggingface_hub` asks for it to download a model."""

import contextlib
import hashlib
import http.server
import json
import re
import threading

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serve(models):
    """Serves {name: folder}, each with a branch `main` and a tag `v1`.

    Gives its address, and a list of the paths that are asked for.

    A file that the folder has as `<name>.size` is said to have that many bytes, and is not there.
    """
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            asked.append(path)
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self.send_info(*found.groups())
            elif found := re.fullmatch(rf"/([^/]+/[^/]+)/resolve/(?:main|v1|{COMMIT})/(.+)", path):
                self.send_file(models[found[1]] / found[2])
            else:
                self.send_body(404, b"", {})

        def send_info(self, name, revision):
            if name not in models:
                return self.send_body(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if revision not in (None, "main", "v1", COMMIT):
                return self.send_body(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            files = []
            for path in sorted(models[name].rglob("*")):
                size = path.stat().st_size
                if path.suffix == ".size":
                    path, size = path.with_suffix(""), int(path.read_text())
                files.append({"rfilename": path.relative_to(models[name]).as_posix(), "size": size})
            info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": []}
            return self.send_body(200, json.dumps(info).encode(), {})

        def send_file(self, path):
            body = path.read_bytes()
            tag = f'"{hashlib.sha1(body).hexdigest()}"'
            return self.send_body(200, body, {"ETag": tag, "X-Repo-Commit": COMMIT})

        def send_body(self, status, body, headers):
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
