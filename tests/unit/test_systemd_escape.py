"""What a unit says is what systemd runs: our escaping against a reader written from systemd's manual.

The reader follows systemd.syntax(7) (quoting), systemd.unit(5) (specifiers) and systemd.service(5) (command lines,
variables); its own rules are checked on the manual's examples.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamaops.deploy.systemd import escape_exec, escape_path, escape_value
from llamaops.errors import WrongProfile

ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", '"': '"', "'": "'",
           "s": " "}
ENVIRONMENT = {"HOME": "/root", "TWO": "two 'more words'"}


def read_words(text: str) -> list[str | None]:
    """Split as systemd does; None stands for the bare ``;`` that ends a command."""
    words: list[str | None] = []
    i = 0
    while i < len(text):
        if text[i] in " \t":
            i += 1
        elif text[i] == ";" and text[i + 1 : i + 2] in ("", " "):
            words.append(None)
            i += 1
        elif text[i : i + 2] == "\\;" and text[i + 2 : i + 3] in ("", " "):
            words.append(";")
            i += 2
        else:
            word, i = read_word(text, i)
            words.append(word)
    return words


def read_word(text: str, i: int) -> tuple[str, int]:
    out, quote = "", ""
    while i < len(text) and (quote or text[i] not in " \t"):
        char = text[i]
        if char == "\\":
            assert text[i + 1] in ESCAPES, "an escape that systemd does not know"
            out += ESCAPES[text[i + 1]]
            i += 1
        elif quote and char == quote:
            quote = ""
        elif not quote and char in "\"'":
            quote = char
        else:
            out += char
        i += 1
    assert not quote, "unbalanced quoting"
    return out, i


def specifiers(word: str) -> str:
    parts = word.split("%%")
    assert not any("%" in part for part in parts), "a specifier"
    return "%".join(parts)


def variables(word: str) -> list[str]:
    if word.startswith("$") and word[1:2] not in ("$", "{", ""):
        return [str(w) for w in read_words(ENVIRONMENT.get(word[1:], ""))]
    out, i = "", 0
    while i < len(word):
        if word.startswith("$$", i):
            out, i = out + "$", i + 2
        elif word.startswith("${", i) and "}" in word[i:]:
            end = word.index("}", i)
            out, i = out + ENVIRONMENT.get(word[i + 2 : end], ""), end + 1
        else:
            out, i = out + word[i], i + 1
    return [out]


def run_by_systemd(value: str) -> tuple[str, list[str]]:
    """Return the program and the arguments that ``ExecStart=value`` starts."""
    assert "\n" not in value and not value.endswith("\\"), "the line would not end here"
    first, *rest = [word if word is None else specifiers(word) for word in read_words(value)]
    assert first and None not in rest, "more than one command"
    program = first.lstrip("@-:+!")
    marks = first[: len(first) - len(program)]
    assert program.startswith("/") and set(marks) <= {":"}, marks
    words = [word for word in rest if word is not None]
    return program, words if ":" in marks else [part for word in words for part in variables(word)]


def test_the_reader_agrees_with_the_manual() -> None:
    assert run_by_systemd("/bin/echo $TWO ${TWO}") == ("/bin/echo", ["two", "more words", "two 'more words'"])
    assert run_by_systemd(r"/bin/echo / >/dev/null & \; ls") == ("/bin/echo", ["/", ">/dev/null", "&", ";", "ls"])
    assert run_by_systemd(r"""/bin/a "two words" 'x'\x""".replace(r"\x", r"\s")) == ("/bin/a", ["two words", "x "])
    assert read_words("/a one ; /a two") == ["/a", "one", None, "/a", "two"]


PRINTABLE = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
HOSTILE = st.text("$%{}\"'\\; #@:-+!=abHOME~é漢\u2028\u0085", max_size=12)
WORDS = PRINTABLE | HOSTILE | st.sampled_from([
    "", " ", ";", "#", "$HOME", "${HOME}", "$$", "$", "%h", "%%", "%", "\\", "\\\\", "a\\", '"', "'", "-x", "@x", "\\n",
    "\\x41", "a b", "a;b", "é", "漢字", "--set", "a=b c", "$TWO", "*", "~", "&&", "\\;"])
PROGRAMS = st.builds("/{}x".format, WORDS.map(lambda word: re.sub(r"[\"'\\]", "", word)))


@settings(max_examples=50, deadline=None)
@given(PROGRAMS, st.lists(WORDS, max_size=4))
@example("/opt/a$HOME/b", ["$HOME", "%i"])
@example("/opt/my (llama) %h;/b", [";", "a", ";"])
def test_systemd_runs_what_was_escaped(program: str, arguments: list[str]) -> None:
    assert run_by_systemd(escape_exec([program, *arguments])) == (program, arguments)


@settings(max_examples=30, deadline=None)
@given(WORDS)
def test_one_value_stays_one_word(text: str) -> None:
    (word,) = read_words(escape_value(f"K={text}"))
    assert word is not None and specifiers(word) == f"K={text}"


@settings(max_examples=30, deadline=None)
@given(WORDS)
def test_one_path_stays_one_path(text: str) -> None:
    path = f"/{text}"
    if "\\" in path or ("'" in path and '"' in path):
        with pytest.raises(WrongProfile):
            escape_path(path)
    else:
        (word,) = read_words(escape_path(path))
        assert word is not None and specifiers(word) == path


@pytest.mark.parametrize("text", ["a\nb", "a\tb", "\x00", "\x1b[0m", "\x7f", "\udcff", "a\r"])
def test_what_no_unit_can_hold_is_refused(text: str) -> None:
    for escape in (lambda t: escape_exec(["/x", t]), lambda t: escape_exec([f"/{t}"]), escape_value, escape_path):
        with pytest.raises(WrongProfile):
            escape(text)


@pytest.mark.parametrize("program", ["llamaops", "./llamaops", "", "/opt/", "-/x", "/it's", '/"x"', "/a\\b"])
def test_the_program_needs_an_absolute_path_that_systemd_takes(program: str) -> None:
    with pytest.raises(WrongProfile):
        escape_exec([program])


def test_plain_command_lines_stay_plain() -> None:
    argv = ["/usr/bin/llamaops", "up", "/etc/llamaops/qwen.yaml", "--set", "engine.path=/opt/b1/llama-server"]
    assert escape_exec(argv) == " ".join(argv)
