"""One systemd unit from a plan: values escaped by systemd's own rules, directives by version and kind of manager."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from llamaops.core.plan import Plan
from llamaops.core.profile import Profile
from llamaops.deploy import limits
from llamaops.deploy.host_tuning import JOURNAL
from llamaops.errors import WrongProfile
from llamaops.resources import resource

STRONGEST_WEIGHT = 10000
"""CPUWeight= that restored full speed beside another busy service; the default is 100 (systemd.resource-control(5))."""
DYNAMIC_USER = "llamaops"
"""Units with one User= name share the dynamic user, and so the cache and runtime folders (systemd.exec(5))."""
KEYS_CREDENTIAL = "api_keys"
HOST_TUNE = "llamaops.host-tune.service"
"""The machine's own unit; no profile's name holds a dot."""
TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - names, not files
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=:,./@^~")


def unit_name(profile: Profile) -> str:
    """Return the unit's file name."""
    return f"llamaops-{profile.name}.service"


def socket_name(profile: Profile) -> str:
    """Return the file name of the socket unit that belongs to the unit."""
    return f"llamaops-{profile.name}.socket"


def render_socket(profile: Profile) -> str:
    """Return the text of a unit that holds the port before and between runs of the service.

    Raises WrongProfile where the profile leaves the port open.
    """
    host, port = profile.serve.host, profile.serve.port
    if port == 0:
        raise WrongProfile("a socket unit needs a port", where="serve.port", why="0 takes any that is free",
                           fix="--set serve.port=8080")
    address = {"localhost": "127.0.0.1"}.get(host.lower(), host)
    listen = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return _template("socket.j2").render(unit=socket_name(profile), name=profile.name, address=listen)


def render_host_tune(executable: str, *, reads: Iterable[str], writes: Iterable[str]) -> str:
    """Return the text of the unit that applies ``host tune`` at boot.

    ``reads`` are paths that must stay readable to it, ``writes`` the folders of configuration files it may change.
    """
    return _template("host-tune.j2").render(
        unit=HOST_TUNE, argv=[executable, "host", "tune", "apply", "--yes"], writes=sorted(writes),
        journal=PurePosixPath(JOURNAL).parent.name, **_hidden([posixpath.normpath(p) for p in (executable, *reads)]))


def escape_exec(argv: Sequence[str]) -> str:
    """Return ``argv`` as the value of ``ExecStart=``, so that systemd runs exactly that (systemd.service(5)).

    Each word is quoted where needed, ``%`` is doubled against specifiers and ``$`` against variables. systemd does not
    undo ``$$`` in the program's own path; a path with ``$`` is therefore marked ``:`` (no variables in this line, since
    systemd 244). Raises WrongProfile for what no unit can hold: control characters, text that is not Unicode, and a
    program path that is not absolute or has quotes or backslashes.
    """
    program = argv[0]
    if not program.startswith("/") or program.endswith("/"):
        raise WrongProfile("a unit needs an absolute path to the program", where=program)
    if any(char in program for char in "\"'\\"):
        raise WrongProfile("systemd does not start this program", where=program, fix="install it under a plainer path",
                           why="it takes no program whose path holds a quote or a backslash")
    literal = "$" in program
    words = [_quote(_specifiers(word if literal else word.replace("$", "$$"))) for word in argv]
    return (":" if literal else "") + " ".join(words)


def escape_value(text: str) -> str:
    """Return one word of a directive that unquotes and unescapes, such as ``Environment=``."""
    return _quote(_specifiers(text))


def escape_path(path: str) -> str:
    """Return one path of a directive that only unquotes, such as ``ReadWritePaths=``.

    Versions differ in what a backslash means there, so it can't be said. Raises WrongProfile for such a path, and for
    one with both kinds of quotes.
    """
    _refuse_unwritable(path)
    quote = "'" if '"' in path else '"'
    if quote in path or "\\" in path:
        raise WrongProfile("a unit can't name this path", where=path, fix="move it to a plainer path",
                           why="it holds a backslash or both kinds of quotes")
    return _specifiers(path) if _PLAIN.issuperset(path) else f"{quote}{_specifiers(path)}{quote}"


def escape_rest(text: str) -> str:
    """Return text that runs to the end of a line without being unquoted, such as the path of ``LoadCredential=``."""
    _refuse_unwritable(text)
    if text != text.strip() or text.endswith("\\"):
        raise WrongProfile("a unit can't name this path", where=text, fix="move it to a plainer path",
                           why="it starts or ends with a space, or ends with a backslash")
    return _specifiers(text)


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")


def _quote(word: str) -> str:
    _refuse_unwritable(word)
    if word and _PLAIN.issuperset(word.replace("%", "").replace("$", "")):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _refuse_unwritable(text: str) -> None:
    if any(ord(char) < 0x20 or ord(char) == 0x7F or 0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise WrongProfile("a unit can't hold this text", where=ascii(text),
                           why="it has control characters or bytes that are not UTF-8", fix="rename it")


def render_unit(
    profile: Profile,
    plan: Plan,
    *,
    executable: str,
    profile_path: str,
    user: bool,
    systemd_version: int | None,
    engine_path: str | None = None,
    run_as: str | None = None,
    cache: str | None = None,
    reads: Iterable[str] = (),
    offline: bool = False,
    cgroup_version: int | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """Return the text of the unit that serves ``profile`` as ``plan`` decided.

    ``executable`` is the absolute path of llamaops; ``user`` renders for a user's own manager. ``run_as`` names the
    account of a system unit (None: a dynamic one); ``cache`` is the cache folder to use instead of the unit's own;
    ``engine_path`` pins the engine; ``reads`` are further paths that must stay readable; ``offline`` tells that nothing
    need be fetched; ``overrides`` are handed on as ``--set``. Where a version is unknown, systemd 247 and cgroup v2 are
    assumed.
    """
    account = _account(profile, user, run_as, cache)
    argv = [executable, "up", profile_path, "--no-build", *(["--offline"] if offline else [])]
    settings = [f"engine.path={_yaml(engine_path)}"] if engine_path else []
    for setting in (*settings, *overrides, *account["settings"]):
        argv += ["--set", setting]
    site = (executable, profile_path, engine_path, cache, *account["secret_files"], *reads)
    paths = [posixpath.normpath(path) for path in site if path]
    context = {"unit": unit_name(profile), "name": profile.name, "user": user, "argv": argv} | account
    context |= _life(profile, systemd_version) | _memory(profile, plan, user)
    context |= _cpu(plan, user, cgroup_version) | _sandbox(profile, paths)
    return _template("service.j2").render(context)


def _yaml(text: str) -> str:
    return text if _PLAIN.issuperset(text) else json.dumps(text.replace("${", "$${"), ensure_ascii=False)


def _account(profile: Profile, user: bool, run_as: str | None, cache: str | None) -> dict[str, Any]:
    keys = profile.serve.api_keys
    secrets = _secrets(profile)
    # A dynamic user can't own a private file: the manager reads it and hands over a copy.
    handed = secrets if run_as is None and not user else []
    return {
        "credentials": [(name, path) for name, _, path in handed],
        "settings": [f"{key}=${{CREDENTIALS_DIRECTORY}}/{name}" for name, key, _ in handed],
        "secret_files": [path for _, _, path in secrets] if not handed else [],
        "dynamic": run_as is None,
        "run_as": run_as or DYNAMIC_USER,
        # systemd hands the folders to the account of the unit that started last: one set per account.
        "folder": f"llamaops-{run_as}" if run_as else "llamaops",
        "environment": {"LLAMAOPS_CACHE": cache} if cache else {},
        "writes": [cache] if cache else [],
        "env_file": f"%h/.config/llamaops/{profile.name}.env" if user else f"/etc/llamaops/{profile.name}.env",
        "env_file_needed": bool(keys and keys.env),
    }


def secret_files(profile: Profile) -> list[str]:
    """Return the paths of the profile's private files."""
    return [path for _, _, path in _secrets(profile)]


def _secrets(profile: Profile) -> list[tuple[str, str, str]]:
    """Return the private files of a profile: the credential's name, the profile's key, the path."""
    keys, tls = profile.serve.api_keys, profile.serve.tls
    found = [(KEYS_CREDENTIAL, "serve.api_keys.file", keys.file if keys else None),
             ("tls_cert", "serve.tls.cert", tls and tls.cert), ("tls_key", "serve.tls.key", tls and tls.key)]
    return [(name, key, path) for name, key, path in found if path]


def _life(profile: Profile, version: int | None) -> dict[str, Any]:
    return {
        "growing_delay": version is not None and version >= 254,
        "reload_by_type": version is not None and version >= 253,
        "stop_seconds": limits.stop_seconds(profile),
    }


def _cpu(plan: Plan, user: bool, cgroup_version: int | None) -> dict[str, Any]:
    """A user's manager can only lower priority, and is not given the cpuset controller: it pins by affinity."""
    placed = plan.placement
    strongest = [nice for nice in (placed.nice, placed.relay_nice, placed.autogroup_nice) if nice is not None]
    lowest = min(strongest) if strongest and not user else None
    nice = placed.relay_nice if not user or (placed.relay_nice or 0) > 0 else None
    return {
        "weight": None if placed.policy == "batch" else placed.weight or STRONGEST_WEIGHT,
        "cpus": str(limits.all_cpus(plan) or ""),
        # The relay's memory too; the engine's is bound by its own command line, in any launch.
        "numa": placed.numa, "mem_nodes": str(placed.mem_nodes or ""),
        "cpuset_by_cgroup": not user and cgroup_version != 1,
        "nice": nice,
        "lowest_nice": lowest if lowest is not None and lowest < 0 else None,
        "real_time": placed.policy in ("fifo", "rr"),
        # Threads that do not compute run one step above those that do.
        "rt_limit": min(99, (placed.rt_priority or 0) + 1) if placed.policy in ("fifo", "rr") and not user else None,
    }


def _memory(profile: Profile, plan: Plan, user: bool) -> dict[str, Any]:
    limit = limits.memory_mib(profile, plan)
    return {"memory_max": f"{limit}M" if limit else None, "lock_memory": plan.memory.lock and not user}


def _sandbox(profile: Profile, paths: Sequence[str]) -> dict[str, Any]:
    """What can be hidden without hiding a path the unit needs."""
    low_port = 0 < profile.serve.port < 1024
    return {
        "mounts": sorted(filter(_nameable, {str(PurePosixPath(path).parent) for path in paths})),
        "capabilities": "CAP_NET_BIND_SERVICE" if low_port else "",
    } | _hidden(paths)


def _hidden(paths: Sequence[str]) -> dict[str, Any]:
    return {
        "protect_home": "read-only" if any_below(paths, ("/home", "/root", "/run/user")) else "yes",
        "private_tmp": not any_below(paths, TEMPORARY),
    }


def _nameable(path: str) -> bool:
    try:
        escape_path(path)
    except WrongProfile:
        return False
    return True


def any_below(paths: Sequence[str], folders: tuple[str, ...]) -> bool:
    """Tell whether any of ``paths`` lies below one of ``folders``, by name alone."""
    return any(PurePosixPath(path).is_relative_to(folder) for path in paths for folder in folders)


def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(resource("templates/systemd")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - units are not HTML; every value goes through a filter below
    )
    environment.filters |= {"exec": escape_exec, "value": escape_value, "path": escape_path, "rest": escape_rest}
    return environment.get_template(name)
