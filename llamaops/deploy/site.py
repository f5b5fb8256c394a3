"""What of this machine and this account goes into a unit: paths, who runs it, which systemd."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamaops.core.engine import Engine
from llamaops.core.model import Model
from llamaops.core.plan import Plan
from llamaops.core.profile import Profile
from llamaops.core.source import PathSource, parse_source
from llamaops.core.tuning import IRQBALANCE_FILES
from llamaops.deploy.container import UID
from llamaops.deploy.systemd import TEMPORARY, any_below, render_host_tune, render_unit, secret_files
from llamaops.dirs import find_dirs
from llamaops.errors import NotPermitted, UsageError

_PYTHON = (sys.prefix, sys.base_prefix)


@dataclass(frozen=True, slots=True)
class Unit:
    """A rendered unit, and what its reader should know before installing it."""

    text: str
    advice: tuple[str, ...]


def deploy_unit(
    profile: Profile,
    plan: Plan,
    engine: Engine | None,
    model: Model | None,
    profile_path: Path,
    *,
    user: bool,
    run_as: str | None = None,
    overrides: Sequence[str] = (),
    cgroup_version: int | None = None,
    environ: Mapping[str, str],
) -> Unit:
    """Render the unit that serves ``profile`` from this machine's files.

    A system unit runs as the account ``run_as``, which must be able to read what it needs; by default as this one, or,
    rendered by root, as a dynamic user where everybody may read that, and as root otherwise. Raises UsageError when
    llamaops itself can't be found as a program, when an override could hold a secret, or when ``run_as`` can't do it.
    """
    _refuse_secrets(overrides)
    if run_as:
        _refuse_unfit(run_as, user=user)
    executable = find_executable()
    pinned = engine.path if engine and profile.engine.path == "auto" else None
    named = (pinned, _path_of(profile), profile.model.imatrix_file)
    reads = [str(executable), str(profile_path), *_PYTHON, *filter(None, named)]
    if run_as:
        require_readable(run_as, (*reads, *secret_files(profile)))
    own_cache = user or (run_as is None and _account(reads) is not None)
    run_as = run_as if run_as or user else _account(reads)
    text = render_unit(
        profile, plan, executable=str(executable), profile_path=str(profile_path), user=user,
        systemd_version=systemd_version(), engine_path=pinned, run_as=run_as, reads=reads, overrides=overrides,
        cache=str(find_dirs(environ).cache) if own_cache else None,
        offline=model is not None and (own_cache or _path_of(profile) is not None), cgroup_version=cgroup_version)
    return Unit(text, tuple(_advice(profile, engine, model, run_as)))


def deploy_host_tune(root: Path = Path("/")) -> str:
    """Render the unit that applies ``host tune`` at boot, for this machine's llamaops and irqbalance."""
    executable = find_executable()
    writes = {f"/{Path(name).parent}" for name in IRQBALANCE_FILES if (root / name).is_file()}
    return render_host_tune(str(executable), reads=(str(executable.resolve()), *_PYTHON), writes=writes)


def _refuse_secrets(overrides: Sequence[str]) -> None:
    """A unit can be read by everybody."""
    for assignment in overrides:
        if assignment.strip().startswith(("engine.env", "engine.args")):
            raise UsageError("this override would stand in the unit for all to read", where="--set engine.…",
                             fix="write ${NAME} in the profile, and NAME=value into the unit's EnvironmentFile=")


def _advice(profile: Profile, engine: Engine | None, model: Model | None, run_as: str | None) -> Iterable[str]:
    if engine is None:
        yield "there is no engine yet and the unit builds none: llamaops engine build"
    if model is None:
        yield ("the model is not here yet, so the unit has no MemoryMax= and fetches at its first start; better: "
               "llamaops model pull, then render again")
    if run_as == "root":
        yield ("the unit runs as root, because only root can read the files it needs; put profile, engine and llamaops "
               "where everybody can read them (/etc, /opt, /usr/local) and render again")
    keys = profile.serve.api_keys
    if keys and keys.env:
        yield f"put {keys.env}='name:key' into the EnvironmentFile= the unit names, mode 0600"


def _path_of(profile: Profile) -> str | None:
    source = parse_source(profile.model.source)
    return source.path if isinstance(source, PathSource) else None


def find_executable() -> Path:
    """Return the absolute path of the llamaops program that runs now, or of the one beside this Python."""
    candidates = [Path(sys.argv[0]), Path(sys.executable).with_name("llamaops")]
    if found := shutil.which("llamaops"):
        candidates.append(Path(found))
    for path in candidates:
        if path.name == "llamaops" and path.is_file() and os.access(path, os.X_OK):
            return path.absolute()
    raise UsageError("a unit needs the llamaops program", where=sys.executable, why="there is none beside this Python",
                     fix="pip install llamaops into an environment that stays, and call llamaops from there")


def systemd_version() -> int | None:
    """Return the major version of the systemd that is installed, None without one."""
    tool = shutil.which("systemctl") or shutil.which("systemd-analyze")
    if tool is None:
        return None
    answer = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=10, check=False)
    found = re.match(r"systemd (\d+)", answer.stdout)
    return int(found[1]) if found else None


def _refuse_unfit(account: str, *, user: bool) -> None:
    if user:
        raise UsageError("a user's own manager runs its units as that user", where=f"--run-as {account}",
                         fix="leave out --user or --run-as")
    if os.geteuid() != 0:
        raise NotPermitted("only root can try what another account may read", where=f"--run-as {account}",
                           fix="call it with sudo")


def require_readable(account: str, paths: Iterable[str]) -> None:
    """Try as ``account`` whether it may read every path: all that counts, access lists too, is the kernel's answer.

    To be called by root. Raises UsageError that names the account or the file.
    """
    try:
        entry = pwd.getpwnam(account)
    except KeyError:
        raise UsageError("there is no such account", where=f"--run-as {account}",
                         fix=f"useradd --system {shlex.quote(account)}") from None
    groups = os.getgrouplist(account, entry.pw_gid)
    for path in paths:
        tried = subprocess.run(["test", "-r", path], user=entry.pw_uid, group=entry.pw_gid, extra_groups=groups,
                               cwd="/", check=False)
        if tried.returncode:
            raise UsageError(f"{account} can't read a file that the unit needs", where=path,
                             why="it is missing, or it or a folder above it is closed to that account",
                             fix="put it where that account may read it, or open it: chmod, chgrp")


def _account(needed: Sequence[str]) -> str | None:
    """A dynamic user sees an empty /tmp and /var/tmp of its own, whatever a unit says (systemd.exec(5))."""
    uid = os.geteuid()
    if uid == 0 and not any_below(needed, TEMPORARY) and all(readable_by_all(Path(path)) for path in needed):
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def readable_by_all(path: Path) -> bool:
    """Tell whether any account may read ``path``: its mode and those of all folders above it, links followed."""
    try:
        folders = {*path.absolute().parents, *path.resolve().parents}
        mode = path.stat().st_mode
        open_file = bool(mode & 0o004) and (not path.is_dir() or bool(mode & 0o001))
        return open_file and all(folder.stat().st_mode & 0o001 for folder in folders)
    except OSError:
        return False


def container_user(profile: Profile, model: Model | None) -> str:
    """Return ``uid:gid`` for a container on this machine, whom its model and keys are readable to; never root's.

    It is this account; rendered by root, the image's own where that may read the files, else their owner. Only a file's
    own mode counts, as each is mounted by itself. Raises UsageError where root alone may read one.
    """
    if os.geteuid() != 0:
        return f"{os.geteuid()}:{os.getegid()}"
    keys = profile.serve.api_keys
    needed = [Path(path) for path in (model and model.path, keys and keys.file) if path]
    private = [path for path in needed if path.exists() and not _image_may_read(path.stat())]
    if not private:
        return f"{UID}:{UID}"
    owner = private[0].stat()
    if owner.st_uid == 0:
        raise UsageError("the container could not read this file", where=str(private[0]),
                         why=f"root alone may, and the container runs as {UID}",
                         fix=f"chgrp {UID} {shlex.quote(str(private[0]))} && chmod g+r {shlex.quote(str(private[0]))}")
    return f"{owner.st_uid}:{owner.st_gid}"


def _image_may_read(file: os.stat_result) -> bool:
    return bool(file.st_mode & 0o004 or (file.st_gid == UID and file.st_mode & 0o040)
                or (file.st_uid == UID and file.st_mode & 0o400))
