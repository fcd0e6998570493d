"""A Hugging Face hub on loopback, as far as `huggingface_hub` asks for it to download a model."""

import contextlib
import hashlib
import http.server
import json
import re
import shutil
import threading

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub import utils as hub_utils

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serve(models, *, xet=(), refused=()):
    """Serves {name: folder}, each with a branch `main` and a tag `v1`.

    Gives its address, and a list of the paths that are asked for.

    A file that the folder has as `<name>.size` is said to have that many bytes, and is not there.

    Args:
      models: the folders.
      xet: endings of files that are kept in Xet storage, whose bytes `copy_from_xet` brings.
      refused: {pattern of a path: (status, headers)} of what is answered so; may change meanwhile.
    """
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            asked.append(path)
            for pattern, (status, headers) in dict(refused).items():
                if re.search(pattern, path):
                    return self.send_body(status, b"", headers)
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.+", path):
                self.send_tree(models[found[1]])
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
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
            files = [
                {"rfilename": file, "size": size, "blobId": blob}
                for file, size, blob in list_files(models[name])
            ]
            info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": []}
            return self.send_body(200, json.dumps(info).encode(), {})

        def send_tree(self, folder):
            files = [
                {"type": "file", "path": file, "size": size, "oid": blob}
                for file, size, blob in list_files(folder)
            ]
            return self.send_body(200, json.dumps(files).encode(), {})

        def send_file(self, path):
            if not path.is_file():
                return self.send_body(404, b"", {"X-Error-Code": "EntryNotFound"})
            headers = {"ETag": f'"{digest(path)}"', "X-Repo-Commit": COMMIT}
            if path.name.endswith(tuple(xet)):
                address = f"http://127.0.0.1:{server.server_port}/xet"
                headers |= {"X-Xet-Hash": xet_hash(path), "Link": f'<{address}>; rel="xet-auth"'}
            return self.send_body(200, path.read_bytes(), headers)

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


def list_files(folder):
    """Path, size and hash of every file, as `serve` tells them."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, size = path.relative_to(folder), path.stat().st_size
        if path.suffix == ".size":
            name, size = name.with_suffix(""), int(path.read_text())
        yield name.as_posix(), size, digest(path)


def digest(path):
    return hashlib.sha1(path.read_bytes()).hexdigest()


def xet_hash(path):
    return hashlib.sha256(b"xet" + path.read_bytes()).hexdigest()


def copy_from_xet(folder, monkeypatch):
    """The transport of Xet's bytes alone is a copy; all else is the library's own."""

    def xet_get(*, incomplete_path, xet_file_data, **_):
        files = [path for path in folder.iterdir() if path.is_file()]
        (found,) = [path for path in files if xet_hash(path) == xet_file_data.file_hash]
        shutil.copy(found, incomplete_path)

    monkeypatch.setattr(file_download, "xet_get", xet_get)


def point_to(address, monkeypatch):
    """As the environment variable HF_ENDPOINT does, which is read when the library is imported."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    for module in (constants, file_download):  # which older versions copy it into
        monkeypatch.setattr(
            module, "HUGGINGFACE_CO_URL_TEMPLATE", address + template, raising=False
        )
    monkeypatch.setattr(constants, "ENDPOINT", address)


@contextlib.contextmanager
def offline():
    """As the environment variable HF_HUB_OFFLINE does."""
    begin_sessions = getattr(hub_utils, "reset_sessions", lambda: None)  # older ones ask at a start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        begin_sessions()
        yield
    begin_sessions()
