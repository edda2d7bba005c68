"""A hub on this machine: as much of the Hugging Face Hub's HTTP protocol as its own client asks of it.

Written from the requests of `huggingface_hub`, which is what the tests drive it with. A commit is a folder of real files;
weights arrive by Git LFS, which the client speaks where Xet is switched off (`environment` does so). It refuses as the hub
does: without a token (401), in somebody else's name (403), what is not there (404), what is there already (409), and cards
whose metadata the hub would not have (400). Nothing else of the hub is here: no branches, pull requests or private
repositories. (The package `hf-local-hub` has no server in it: its wheel starts a program that one has to build oneself.)
"""

import base64
import hashlib
import json
import re
import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

TOKEN, USER = "hf_of_me", "me"
LARGE = (".safetensors", ".parquet", ".png")
LICENSES = ("apache-2.0", "mit", "cc-by-4.0", "llama3.2", "gemma", "other")  # a few of those that the hub knows


class Refusal(Exception):
    """An answer that is an error: its status, the hub's word for it, a sentence."""

    def __init__(self, status: int, code: str = "", message: str = ""):
        self.status, self.code, self.message = status, code, message


class LocalHub:
    """Repositories on disk: `models/me/name/<commit>/`, whose newest commit `main` names.

    Attributes:
        broken: a pattern; requests whose path it matches fail with status 500.
        requests: method and path of every request.
    """

    def __init__(self, folder: Path):
        self.folder, self.broken, self.requests = folder, None, []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    @contextmanager
    def serving(self):
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            thread.join()

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Of a process that knows this hub and no other, with nothing downloaded yet."""
        settings = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }
        return settings | ({"HF_TOKEN": token} if token else {})

    def files(self, repo: str, kind: str = "models") -> Path:
        """The folder of the newest commit."""
        place = self.folder / kind / repo
        if not (place / "main").is_file():
            raise Refusal(404, "RepoNotFound", "Repository not found")
        return place / (place / "main").read_text()

    def add_commit(self, kind: str, repo: str, change=lambda folder: None) -> str:
        """Copies the newest commit, if there is one, and changes the copy."""
        place = self.folder / kind / repo
        commit = hashlib.sha1(f"{kind}/{repo} {len(self.commits(repo, kind))}".encode()).hexdigest()
        if (place / "main").exists():
            shutil.copytree(self.files(repo, kind), place / commit)
        else:
            (place / commit).mkdir(parents=True)
        change(place / commit)
        (place / "main").write_text(commit)
        return commit

    def commits(self, repo: str, kind: str = "models") -> list[Path]:
        place = self.folder / kind / repo
        return [path for path in place.iterdir() if path.is_dir()] if place.exists() else []

    def large_file(self, oid: str) -> Path:
        (self.folder / "lfs").mkdir(exist_ok=True)
        return self.folder / "lfs" / oid


def oids(path: Path) -> dict:
    """A file as the hub lists it: Git's hash, and of a large file the hash that Git LFS goes by."""
    data = path.read_bytes()
    listed = {"oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), "size": len(data)}
    if path.name.endswith(LARGE):
        listed["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return listed


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer's body would wait for the client to acknowledge its headers

    def log_message(self, *args):
        pass

    def handle_request(self):
        # Read in any case: what is left of a refused request would be taken for the next one.
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        try:
            if self.hub.broken and re.search(self.hub.broken, path):
                raise Refusal(500, message="Internal error")
            for pattern, method in ROUTES:
                if match := re.fullmatch(pattern, f"{self.command.replace('HEAD', 'GET')} {path}"):
                    return method(self, *match.groups())
            raise Refusal(404, message=f"No such route: {self.command} {path}")
        except Refusal as refusal:
            said = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            self.answer(refusal.status, {"error": refusal.message, "errors": [{"message": refusal.message}]}, said)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def answer(self, status: int, content, headers: dict | None = None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **(headers or {})}.items():
            if value != "":
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def query(self) -> dict:
        return parse_qs(urlsplit(self.path).query)

    def check_token(self):
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(401, message="Invalid username or password.")

    def check_write(self, repo: str):
        self.check_token()
        if not repo.startswith(f"{USER}/"):
            raise Refusal(403, message=f"You don't have the rights to write to {repo}")

    def commit(self, kind: str, repo: str, revision: str) -> Path:
        head = self.hub.files(repo, kind)
        folder = head if revision == "main" else head.parent / revision
        if not folder.is_dir():
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return folder

    def create(self):
        wanted = json.loads(self.body)
        repo, kind = f"{wanted['organization'] or USER}/{wanted['name']}", wanted.get("type", "model") + "s"
        self.check_write(repo)
        url = {"url": f"{self.hub.endpoint}/{'' if kind == 'models' else kind + '/'}{repo}"}
        if self.hub.commits(repo, kind):
            return self.answer(409, url | {"error": "You already created this repo"})
        self.hub.add_commit(kind, repo)
        self.answer(200, url)

    def may_write(self, kind: str, repo: str):
        self.hub.files(repo, kind)
        self.check_write(repo)
        self.answer(200, {})

    def validate_card(self):
        card = json.loads(self.body)["content"]
        front = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
        data = (yaml.safe_load(front[1]) if front else None) or {}
        named = data.get("base_model", [])
        for name in [named] if isinstance(named, str) else named:
            try:
                validate_repo_id(name)
            except HFValidationError:
                raise Refusal(400, message=f'"base_model" with value "{name}" is not valid. Use a model id.') from None
        if data.get("license", "other") not in LICENSES:
            raise Refusal(400, message=f'"license" must be one of {LICENSES}')
        self.answer(200, {"errors": [], "warnings": []})

    def preupload(self, kind: str, repo: str, revision: str):
        self.check_write(repo)
        folder, answers = self.commit(kind, repo, revision), []
        for file in json.loads(self.body)["files"]:
            mode = "lfs" if file["path"].endswith(LARGE) else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            if (folder / file["path"]).is_file():
                held = oids(folder / file["path"])
                answers[-1]["oid"] = held.get("lfs", held)["oid"]
        self.answer(200, {"files": answers})

    def lfs_batch(self, repo: str):
        self.check_write(repo)
        objects = json.loads(self.body)["objects"]
        for wanted in objects:
            if not self.hub.large_file(wanted["oid"]).exists():
                wanted["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{wanted['oid']}"}}
        self.answer(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str):
        """As at the hub, whoever was given this address may write to it, once."""
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, message="The content is not what was announced")
        self.hub.large_file(oid).write_bytes(self.body)
        self.answer(200, {})

    def add_commit(self, kind: str, repo: str, revision: str):
        self.check_write(repo)
        self.commit(kind, repo, revision)
        header, *operations = map(json.loads, self.body.splitlines())
        if not header["value"]["summary"]:
            raise Refusal(400, message="A commit needs a summary")

        def change(folder: Path):
            for operation in operations:
                path, value = folder / operation["value"]["path"], operation["value"]
                path.parent.mkdir(parents=True, exist_ok=True)
                if operation["key"] == "file":
                    path.write_bytes(base64.b64decode(value["content"]))
                elif operation["key"] == "lfsFile":
                    shutil.copyfile(self.hub.large_file(value["oid"]), path)
                elif operation["key"] == "deletedFile":
                    path.unlink()
                else:
                    raise Refusal(400, message=f"Not known here: {operation['key']}")

        commit = self.hub.add_commit(kind, repo, change)
        self.answer(
            200, {"success": True, "commitOid": commit, "commitUrl": f"{self.hub.endpoint}/{repo}/commit/{commit}"}
        )

    def info(self, kind: str, repo: str, revision: str | None):
        folder = self.commit(kind, repo, revision or "main")
        names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        siblings = [{"rfilename": name} for name in names]
        self.answer(
            200, {"id": repo, "sha": folder.name, "siblings": siblings, "tags": [], "private": False, "gated": False}
        )

    def list_files(self, kind: str, repo: str, revision: str, inside: str | None):
        folder = self.commit(kind, repo, revision)
        place = folder / (inside or "")
        if not place.exists():
            raise Refusal(404, "EntryNotFound", "Entry not found")
        recursive = self.query.get("recursive") in (["true"], ["True"], ["1"])
        self.answer(
            200, [self.entry(path, folder) for path in sorted(place.rglob("*") if recursive else place.iterdir())]
        )

    @staticmethod
    def entry(path: Path, folder: Path) -> dict:
        place = {"path": str(path.relative_to(folder))}
        if path.is_dir():
            return place | {"type": "directory", "oid": hashlib.sha1(place["path"].encode()).hexdigest(), "size": 0}
        return place | {"type": "file", **oids(path)}

    def resolve(self, kind: str | None, repo: str, revision: str, name: str):
        folder = self.commit(kind or "models", repo, revision)
        path = folder / name
        if not path.is_file():
            raise Refusal(404, "EntryNotFound", "Entry not found")
        data, held = path.read_bytes(), oids(path)
        headers = {"X-Repo-Commit": folder.name, "ETag": f'"{held.get("lfs", held)["oid"]}"', "Accept-Ranges": "bytes"}
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not part:
            return self.answer(200, data, headers)
        first, last = int(part[1]), min(int(part[2] or len(data)), len(data) - 1)
        self.answer(206, data[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})


REPO = r"([^/]+/[^/]+?)"
IN_API = rf"/api/(models|datasets)/{REPO}"
ROUTES = [
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", Handler.validate_card),
    (rf"GET {IN_API}/auth-check/write", Handler.may_write),
    (rf"POST {IN_API}/preupload/([^/]+)", Handler.preupload),
    (rf"POST /(?:datasets/)?{REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (r"PUT /lfs/([0-9a-f]{64})", Handler.lfs_put),
    (rf"POST {IN_API}/commit/([^/]+)", Handler.add_commit),
    (rf"GET {IN_API}(?:/revision/([^/]+))?", Handler.info),
    (rf"GET {IN_API}/tree/([^/]+)(?:/(.+))?", Handler.list_files),
    (rf"GET /(?:(datasets)/)?{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
]
