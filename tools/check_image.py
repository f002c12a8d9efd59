"""Build the container image, start it, talk to it with curl, and look for anything of this machine left inside.

    python3 tools/check_image.py      as root, with buildah, debootstrap and curl; otherwise the standard library alone

There need not be a container daemon nor an image registry: the base is a debootstrap tree, kept between runs, and
buildah works with the vfs driver and chroot isolation (which shares the host's network, so the port is simply there).
Where Debian's packages and Python's come from is read from apt and pip at run time and handed to the build as secrets;
each secret carries a random mark, and the finished image must hold neither the marks nor the machine's own settings.
"""

import argparse
import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITE = "bookworm"
BASE = f"localhost/octavo-base:{SUITE}"
IMAGE = "localhost/octavo:check"
CA_IN_BUILD = "/run/secrets/ca.pem"
PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout")
# A tree's parts that say nothing to a program, or something about the machine that made it.
NOT_IN_BASE = (
    "etc/resolv.conf",
    "etc/hostname",
    "etc/apt/sources.list",
    "etc/apt/apt.conf.d/01proxy",
    "var/cache/apt",
    "var/cache/debconf",
    "var/lib/apt/lists",
    "var/log",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
)


class CheckFailed(Exception):
    """What the image does not do, in words."""


def run(*command: str | Path, timeout_s: float = 600) -> str:
    """Run a command, return what it prints; its own words go to our standard error."""
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)
        raise CheckFailed(f"{' '.join(map(str, command[:8]))} ... exited with {done.returncode}")
    return done.stdout.strip()


def setting(*command: str) -> str:
    """What a program says of its own settings; nothing if it has none."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


class Buildah:
    """buildah with a store of its own, so that nothing else on the machine is seen or touched."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def command(self, verb: str, *args: str | Path) -> list[str]:
        where = ["--storage-driver", "vfs", "--root", self._store / "root", "--runroot", self._store / "run"]
        return [str(part) for part in ("buildah", *where, verb, *args)]

    def __call__(self, verb: str, *args: str | Path, timeout_s: float = 600) -> str:
        return run(*self.command(verb, *args), timeout_s=timeout_s)

    def has(self, image: str) -> bool:
        return image in setting(*self.command("images", "--format", "{{.Name}}:{{.Tag}}")).splitlines()

    @contextlib.contextmanager
    def container(self, image: str) -> Iterator[str]:
        name = self("from", "--pull-never", image)
        try:
            yield name
        finally:
            self("rm", name)


def make_base(buildah: Buildah, work: Path) -> None:
    """Commit a minimal Debian with Python as the base image, from the mirror and proxy that apt uses here."""
    tree = work / "tree"
    mirrors = setting(
        "apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {SUITE}", "Created-By: Packages"
    )
    proxy = setting("apt-config", "shell", "P", "Acquire::http::Proxy").removeprefix("P='").removesuffix("'")
    if proxy:
        os.environ.setdefault("http_proxy", proxy)
    packages = "--include=python3,python3-venv,ca-certificates"
    print(f"debootstrap {SUITE} (once; kept for later runs)", flush=True)
    run("debootstrap", "--variant=minbase", packages, SUITE, tree, *mirrors.splitlines()[:1], timeout_s=900)
    for name in NOT_IN_BASE:
        path = tree / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (tree / "var/log").mkdir()
    (tree / "var/lib/apt/lists/partial").mkdir(parents=True)
    (tree / "var/cache/apt/archives/partial").mkdir(parents=True)
    (tree / "var/cache/debconf").mkdir()
    run("tar", "--create", "--one-file-system", "--directory", tree, "--file", work / "base.tar", ".")
    shutil.rmtree(tree)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, work / "base.tar", "/")
    buildah("commit", "--quiet", "--format", "docker", "--rm", container, BASE)


def pip_settings() -> dict[str, str]:
    """How pip reaches its index from this machine, less what only lies on its disk."""
    found: dict[str, str] = {}
    for line in setting(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        words = [word for word in value.strip("'\"").split() if not word.startswith("file:")]
        if key in PIP_KEYS and words:
            found[key] = " ".join(words)
    return found


def ca_bundle() -> Path:
    """The certificates this machine trusts."""
    named = [os.environ.get(name, "") for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")]
    paths = [Path(name) for name in (*named, "/etc/ssl/certs/ca-certificates.crt") if name]
    return next(path for path in paths if path.is_file())


def build(buildah: Buildah, work: Path, extras: str) -> list[str]:
    """Build the image; returns the marks that only the secrets carried."""
    marks = [secrets.token_hex(16), secrets.token_hex(16)]
    lines = [f"{key} = {value}" for key, value in pip_settings().items()]
    pip_conf, bundle = work / "pip.conf", work / "ca.pem"
    pip_conf.write_text("\n".join([f"# {marks[0]}", "[global]", f"cert = {CA_IN_BUILD}", *lines, ""]))
    bundle.write_bytes(ca_bundle().read_bytes() + f"\n# {marks[1]}\n".encode())
    secret = ("--secret", f"id=pip_conf,src={pip_conf}", "--secret", f"id=ca_bundle,src={bundle}")
    where = ("--isolation", "chroot", "--network", "host", "--pull-never", "--build-arg", f"BASE_IMAGE={BASE}")
    where += ("--build-arg", f"EXTRAS={extras}")
    buildah("bud", "--quiet", "--format", "docker", *where, *secret, "--tag", IMAGE, ROOT, timeout_s=900)
    return marks


def settings_of_this_machine(buildah: Buildah, container: str) -> list[str]:
    """Words that would give this machine away: package indexes, proxies, and certificates that it alone trusts."""
    keys = ("index-url", "extra-index-url", "proxy")
    words = [word for key in keys for word in pip_settings().get(key, "").split()]
    words += [v for k, v in os.environ.items() if k.lower() in {"http_proxy", "https_proxy", "all_proxy"} and v]
    known = Path(buildah("mount", container), "etc/ssl/certs/ca-certificates.crt")
    public = known.read_text() if known.is_file() else ""
    buildah("umount", container)
    certificates = ca_bundle().read_text().split("-----BEGIN CERTIFICATE-----\n")[1:]
    # The fifth line of a certificate's base64 is well inside its names, keys and serial number.
    lines = [certificate.splitlines()[4] for certificate in certificates if len(certificate.splitlines()) > 4]
    return words + [line for line in lines if line not in public]


def check_nothing_baked_in(buildah: Buildah, container: str, work: Path, marks: list[str]) -> None:
    """Search every layer and the image's description, not only the files that are visible in the end."""
    archive, patterns = work / "image.tar", work / "patterns"
    buildah("push", "--quiet", IMAGE, f"docker-archive:{archive}")
    words = [*marks, *settings_of_this_machine(buildah, container)]
    patterns.write_text("\n".join(words) + "\n")
    found = subprocess.run(
        ["grep", "-aoF", "-m1", "-f", patterns, archive], capture_output=True, text=True, check=False
    )
    if found.returncode != 1:
        raise CheckFailed(f"the image holds settings of the machine that built it: {found.stdout[:200]!r}")
    tree = Path(buildah("mount", container))
    places = ("etc/pip.conf", "etc/xdg/pip", "root/.config/pip", "root/.pip", "home/octavo/.config/pip", "src")
    left = [place for place in (*places, CA_IN_BUILD[1:]) if (tree / place).exists()]
    buildah("umount", container)
    if left:
        raise CheckFailed(f"left in the image: {', '.join(left)}")
    print(f"nothing of this machine inside: looked for {len(words)} words and {len(places) + 1} files")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def server(buildah: Buildah, container: str, entrypoint: list[str], port: int) -> Iterator[int]:
    """The image's own entry point in a container; yields the server's process id, then asks it to stop."""
    # The shell names its process id and becomes the server: chroot isolation has no process ids of its own.
    shell = ("sh", "-c", 'echo $$; exec "$@"', "sh")
    command = buildah.command("run", "--isolation", "chroot", "--env", f"OCTAVO_PORT={port}", container, "--", *shell)
    process = subprocess.Popen([*command, *entrypoint], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    try:
        deadline = time.monotonic() + 60
        while not is_healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CheckFailed(f"the server did not become healthy (exit {process.poll()})")
            time.sleep(0.1)
        yield pid
        os.kill(pid, signal.SIGTERM)
        if process.wait(timeout=30):
            raise CheckFailed(f"SIGTERM made the server exit with {process.returncode}")
        print("SIGTERM: ended with 0")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def curl(port: int, path: str, *more: str) -> str:
    return run(
        "curl", "--silent", "--show-error", "--fail", "--max-time", "60", *more, f"http://127.0.0.1:{port}{path}"
    )


def check_answers(port: int) -> None:
    """The README's request, streamed: several events, some text, the end mark."""
    body = {"prompt": "Once upon a time", "max_tokens": 64, "stream": True}
    json_body = ("-H", "content-type: application/json", "-d", json.dumps(body))
    events = [line.removeprefix("data: ") for line in curl(port, "/v1/completions", "-N", *json_body).split("\n\n")]
    if events[-1] != "[DONE]":
        raise CheckFailed(f"the stream ended with {events[-1]!r}")
    choices = [choice for event in events[:-1] if event.startswith("{") for choice in json.loads(event)["choices"]]
    text = "".join(choice["text"] for choice in choices)
    if len(choices) < 5 or not text.strip():
        raise CheckFailed(f"{len(choices)} choices came, with the text {text!r}")
    print(f"streamed {len(events)} events: {text!r}")


def check_runs(buildah: Buildah, container: str, config: dict[str, list[str]]) -> None:
    """Health, an answer, the health check's own command, and that none of it runs as root."""
    port = free_port()
    with server(buildah, container, config["Entrypoint"], port) as pid:
        curl(port, "/health")
        check_answers(port)
        uid = os.stat(f"/proc/{pid}").st_uid
        if uid == 0:
            raise CheckFailed("the server runs as root")
        probe = config["Healthcheck"]["Test"][1:]  # type: ignore[call-overload]
        buildah("run", "--isolation", "chroot", "--env", f"OCTAVO_PORT={port}", container, "--", *probe)
        print(f"runs as uid {uid}; the health check passes")


def print_size(archive: Path) -> None:
    """The layers as they lie on a disk, the first of them the base, and what a pull would transfer."""
    with tarfile.open(archive) as tar:
        manifest = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        base, *ours = (tar.getmember(layer).size / 1e6 for layer in manifest[0]["Layers"])
    packed = len(subprocess.run(["gzip", "-1c", archive], stdout=subprocess.PIPE, check=True).stdout) / 1e6
    print(f"image size: {sum(ours):.0f} MB on a base of {base:.0f} MB; both packed for transfer {packed:.0f} MB")


def check(buildah: Buildah, work: Path, extras: str) -> None:
    if not buildah.has(BASE):
        make_base(buildah, work)
    started = time.monotonic()
    marks = build(buildah, work, extras)
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    try:
        image = json.loads(buildah("inspect", "--type", "image", IMAGE))
        with buildah.container(IMAGE) as container:
            check_runs(buildah, container, image["Docker"]["config"])
            check_nothing_baked_in(buildah, container, work, marks)
        print_size(work / "image.tar")
    finally:
        buildah("rmi", "--force", IMAGE)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the container image and talk to it.")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "octavo", "image")
    parser.add_argument("--cache", type=Path, default=cache, help="where the base image is kept between runs")
    parser.add_argument("--fresh", action="store_true", help="make the base image anew")
    parser.add_argument("--extras", default="", help="of the package, to be installed too: fast")
    options = parser.parse_args()
    missing = [name for name in ("buildah", "debootstrap", "curl", "tar", "gzip") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        parser.error(f"needs root and {', '.join(missing) or 'nothing else'}")
    if options.fresh:
        shutil.rmtree(options.cache, ignore_errors=True)
    options.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.cache) as work:
        try:
            check(Buildah(options.cache), Path(work), options.extras)
        except (CheckFailed, subprocess.TimeoutExpired) as error:
            print(f"image check failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
