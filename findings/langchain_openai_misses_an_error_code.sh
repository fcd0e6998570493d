#!/bin/sh
# langchain-openai does not know a prompt that is too long by OpenAI's own code for it.
#
# OpenAI's API, and servers that follow it, refuse such a prompt with status 400 and the code
# "context_length_exceeded". langchain-openai 1.7.4 raises ContextOverflowError where it finds that
# code in str(error). openai 3.57.0 shows no more of a refusal than its message, so that the code is
# in error.code and never in that text: the error is a plain invalid request, and what makes a
# conversation shorter does not run. Only words within the message are recognised, such as Anthropic's
# "prompt is too long". So whoever serves these clients has to write the words, whatever the code says.
#
# Seen: code alone -> OpenAIInvalidRequestError; the same code and those words -> OpenAIContextOverflowError.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet openai==3.57.0 langchain-openai==1.7.4
cat > "$work/show.py" <<'PY'
import http.server
import json
import threading

from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

told = ""


class Refusing(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        error = {"message": told, "type": "invalid_request_error", "param": "messages",
                 "code": "context_length_exceeded"}
        body = json.dumps({"error": error}).encode()
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = ChatOpenAI(model="m", api_key="k", max_retries=0,
                   base_url=f"http://127.0.0.1:{server.server_port}/v1")
for told, is_known in (
    ("This model's maximum context length is 8 tokens. Your messages have 9.", False),
    ("prompt is too long: 9 tokens > 8 maximum", True),
):
    try:
        model.invoke("hi")
    except Exception as error:
        print(f"{told!r}: {type(error).__name__}, code {error.code!r}, text {str(error)!r}")
        assert error.code == "context_length_exceeded"
        assert isinstance(error, ContextOverflowError) == is_known
    else:
        raise AssertionError("it was not refused")
PY
"$work/venv/bin/python" "$work/show.py"
