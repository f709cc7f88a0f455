"""A small hub: the HTTP API of the Hugging Face hub as its own client uses it, and its faults.

Two servers on the loopback, as in life: the hub answers questions and keeps small files, the
storage keeps large ones (LFS) and is where the hub redirects to. What the client asks for:

- ``GET /api/whoami-v2``
- ``GET /api/models/{repository}/revision/{revision}?blobs=true``
- ``HEAD`` and ``GET /{repository}/resolve/{revision}/{file}``, with ``ETag`` and
  ``X-Repo-Commit``; for a large file ``X-Linked-ETag``, ``X-Linked-Size`` and a redirect
- ``GET /{sha256}`` of the storage, whole or by ``Range``

It offers no xet. Anything that is not ``GET`` or ``HEAD`` is answered with 405 and remembered.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

CHUNK = 1 << 16


@dataclass
class Fault:
    """What goes wrong, ``times`` times, with requests whose ``METHOD path`` matches ``where``."""

    where: str
    times: int = 1
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0  # before the answer
    cut_after: int | None = None  # bytes of the body, then the connection is closed
    corrupt: bool = False  # one byte differs, the length does not
    shorten: int = 0  # bytes that the body lacks, and the length with it
    ignore_range: bool = False


@dataclass
class Repository:
    """Files by revision; every branch and tag names a commit."""

    files: dict[str, dict[str, bytes]]  # commit -> name -> content
    revisions: dict[str, str]  # branch or tag -> commit
    private: bool = False
    gated: bool = False
    licence: str | None = "apache-2.0"
    lfs: tuple[str, ...] = (".safetensors", ".gguf", ".bin", ".model")
    digests: bool = True  # whether the listing carries them


@dataclass
class Token:
    """Who a token is, and what it may read."""

    role: str = "read"
    reads: tuple[str, ...] = ()
    permissions: tuple[str, ...] = ()


@dataclass
class Asked:
    """One request as it was answered."""

    server: str  # "hub" or "storage"
    method: str
    path: str
    token: str | None
    range: str | None
    status: int = 0
    sent: int = 0
    whole: bool = False


def commit_of(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha1(files[name]).digest())
    return digest.hexdigest()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """The two servers; use it as a context manager."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: dict[str, Token] = {}
        self.faults: list[Fault] = []
        self.asked: list[Asked] = []
        self.bytes_per_s: float | None = None
        self._lock = threading.Lock()
        self._servers = [self._serve("hub"), self._serve("storage")]
        self.endpoint, self.storage = (
            f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers
        )

    def __enter__(self) -> "Hub":
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, name: str, files: Mapping[str, bytes], revision="main", **options) -> str:
        """Push ``files`` as a commit that ``revision`` names; returns the commit."""
        commit = commit_of(files)
        known = self.repositories.setdefault(name, Repository({}, {}))
        known.files[commit] = dict(files)
        known.revisions[revision] = commit
        for key, value in options.items():
            setattr(known, key, value)
        return commit

    def fail(self, where: str, **what) -> None:
        self.faults.append(Fault(where, **what))

    def gets(self, server="storage") -> list[Asked]:
        return [one for one in self.asked if one.server == server and one.method == "GET"]

    def fault_for(self, request: str) -> Fault:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.where, request):
                    fault.times -= 1
                    return fault
        return Fault("")

    def blob(self, sha256: str) -> bytes | None:
        for repository in self.repositories.values():
            for files in repository.files.values():
                for name, content in files.items():
                    if name.endswith(repository.lfs) and _sha256(content) == sha256:
                        return content
        return None

    def _serve(self, which: str) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"hub": self, "which": which})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        return server


_DIGESTS: dict[int, tuple[bytes, str]] = {}


def _sha256(content: bytes) -> str:
    known = _DIGESTS.get(id(content))
    if known is None or known[0] is not content:
        known = _DIGESTS[id(content)] = (content, hashlib.sha256(content).hexdigest())
    return known[1]


class _Answer(Exception):
    """An answer that is not the file."""

    def __init__(self, status: int, headers=None, body: bytes = b"") -> None:
        self.status, self.headers, self.body = status, dict(headers or {}), body


def _error(status: int, code: str | None, message: str) -> _Answer:
    headers = {"X-Error-Message": message}
    if code:
        headers["X-Error-Code"] = code
    return _Answer(status, headers, json.dumps({"error": message}).encode())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    which: str

    def log_message(self, *_):
        pass

    def __getattr__(self, name):
        if name.startswith("do_"):  # every method there is
            return self.answer
        raise AttributeError(name)

    def answer(self):
        path = urlsplit(self.path).path
        bearer = self.headers.get("Authorization", "")
        token = bearer.removeprefix("Bearer ") if bearer else None
        asked = Asked(self.which, self.command, path, token, self.headers.get("Range"))
        self.hub.asked.append(asked)
        fault = self.hub.fault_for(f"{self.command} {path}")
        time.sleep(fault.delay_s)
        try:
            if self.command not in ("GET", "HEAD"):
                raise _Answer(405)
            if fault.status is not None:
                raise _Answer(fault.status, fault.headers, b"the hub has a bad day")
            at_hub = self.which == "hub"
            content, headers = self.hub_file(path, token) if at_hub else self.blob(path)
            self.send_file(asked, fault, content, headers)
        except _Answer as answer:
            asked.status = answer.status
            self.send_response(answer.status)
            for key, value in answer.headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def send_file(self, asked, fault, content, headers):
        if fault.corrupt:
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        if fault.shorten:
            content = content[: -fault.shorten]
        first = 0
        if asked.range and not fault.ignore_range:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.range).groups()
            first = int(first)
            if first >= len(content):
                raise _Answer(416, {"Content-Range": f"bytes */{len(content)}"})
            end = min(int(last) + 1, len(content)) if last else len(content)
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
            content, asked.status = content[first:end], 206
        else:
            asked.status = 200
        self.send_response(asked.status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = len(content) if fault.cut_after is None else fault.cut_after
        for start in range(0, stop, CHUNK):
            piece = content[start : min(start + CHUNK, stop)]
            self.wfile.write(piece)
            asked.sent += len(piece)
            if self.hub.bytes_per_s:
                time.sleep(len(piece) / self.hub.bytes_per_s)
        asked.whole = asked.sent == len(content)
        if fault.cut_after is not None:
            self.close_connection = True

    def blob(self, path):
        content = self.hub.blob(path.strip("/"))
        if content is None:
            raise _Answer(404)
        return content, {"ETag": f'"{path.strip("/")}"', "Accept-Ranges": "bytes"}

    def hub_file(self, path, token):
        if token is not None and token not in self.hub.tokens:
            raise _error(401, None, "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            raise _json(self.whoami(token))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        if api:
            name, revision = api[1], unquote(api[2] or "main")
            raise _json(self.listing(name, self.repository(name, token), revision))
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not resolve:
            raise _Answer(404)
        name, revision, file = resolve[1], unquote(resolve[2]), unquote(resolve[3])
        repository = self.repository(name, token)
        if repository.gated and not self.may_read(name, token):
            raise _error(
                403 if token else 401, "GatedRepo", f"Access to model {name} is restricted"
            )
        commit = self.commit(repository, revision)
        content = repository.files[commit].get(file)
        if content is None:
            raise _error(404, "EntryNotFound", "Entry not found")
        common = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if file.endswith(repository.lfs):
            digest = _sha256(content)
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"'}
            place = {"Location": f"{self.hub.storage}/{digest}"}
            raise _Answer(302, {**common, **linked, **place})
        return content, {**common, "ETag": f'"{git_sha1(content)}"'}

    def whoami(self, token):
        if token is None:
            raise _error(401, None, "Invalid username or password.")
        known = self.hub.tokens[token]
        access = {"displayName": "a token", "role": known.role}
        if known.role == "fineGrained":
            scoped = [{"entity": {"type": "user"}, "permissions": list(known.permissions)}]
            access["fineGrained"] = {"scoped": scoped, "global": []}
        return {"type": "user", "name": "someone", "auth": {"accessToken": access}}

    def may_read(self, name, token):
        return token is not None and name in self.hub.tokens[token].reads

    def repository(self, name, token):
        known = self.hub.repositories.get(name)
        if known is None or (known.private and not self.may_read(name, token)):
            raise _error(404 if token else 401, "RepoNotFound", "Repository not found")
        return known

    def commit(self, repository, revision):
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.files:
            raise _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def listing(self, name, repository, revision):
        commit = self.commit(repository, revision)
        siblings = []
        for file, content in sorted(repository.files[commit].items()):
            entry = {"rfilename": file, "size": len(content)}
            if repository.digests:
                entry["blobId"] = git_sha1(content)
                if file.endswith(repository.lfs):
                    lfs = {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}
                    entry["lfs"] = lfs
            siblings.append(entry)
        card = {"license": repository.licence} if repository.licence else {}
        return {
            "_id": "0",
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "tags": [],
            "downloads": 0,
            "siblings": siblings,
            "cardData": card,
        }


def _json(value) -> _Answer:
    return _Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())
