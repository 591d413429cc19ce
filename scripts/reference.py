"""Write the reference pages of docs/ from the code: commands, codes, errors, metrics, permissions, configuration keys.

Each is a function of nothing that returns the page; PAGES says which. A test fails while one is not up to date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

from ha import causes, errors
from ha.admin.metrics import LABELS, METRICS
from ha.cli import application
from ha.protocol.codes import PutStatus, RequestCode, ResponseCode
from scripts import configuration_table, permissions_table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COMMANDS_HEAD = """\
# Commands and flags

What `ha COMMAND --help` shows. Examples and exit codes: [the command ha](../cli.md).
"""

CODES_HEAD = """\
# Request and response codes

Numbers and names are RocketMQ's. What nobody answers gets response code 3, `request type N not supported`. Which test
shows that an answer is RocketMQ's: [compatibility](../compatibility.md).

## Requests

| code | name | who answers it, and where |
|---|---|---|
"""

STATUSES_HEAD = """
## Statuses of a put

What a producer gets; [what each promises](../statuses.md). The remark is in the answer unless there is a cause to tell.

| status | response code | stored | remark |
|---|---|---|---|
"""

CAUSES_HEAD = """
## Causes

Why a put was not answered PUT_OK. The remark says it in words and numbers; log lines (`put_not_ok cause=…`) and
metrics (`cause="…"`) have these names.

| cause | |
|---|---|
"""

RESPONSES_HEAD = """
## Responses

| code | name |
|---|---|
"""

METRICS_HEAD = """\
# Metrics

What `/metrics` on the admin port shows Prometheus. Names have Prometheus' base units; those that end in `_total` only
grow. Alert rules and a Grafana dashboard on them are in `deploy/`.

| metric | kind | labels | shown by | what it says |
|---|---|---|---|---|
"""

LABELS_HEAD = """
## Labels

| label | values |
|---|---|
"""

ERRORS_HEAD = """\
# Errors

Every exception that halog raises on purpose is an `ha.errors.HalogError`. Catch the kind whose cure you have; each
carries its facts as fields. Expected conditions (a slave that lags, a flush that is late) are no exceptions but
[statuses](../statuses.md).

"""

MADE = "<!-- Made by scripts/reference: change the code that it tells of, and run it. -->\n\n"


def commands() -> str:
    """Every command of `ha` with its flags."""
    with patch.object(sys, "argv", ["ha"]):  # whose name usage lines are made of
        text = application().generate_docs(output_format="markdown")
    text = text[text.index("\n## ha ") :]  # what comes before lists the commands
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n*", "", text).replace(" *[default: False]*", "")
    return MADE + COMMANDS_HEAD + text.rstrip() + "\n"


# ---- codes


def _codes_in(node: ast.AST) -> set[RequestCode]:
    return {
        RequestCode[each.attr]
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "RequestCode"
    }


def _answered(path: Path) -> Iterator[RequestCode]:
    """Codes that a module answers: keys of a table of handlers, cases of a match, sets called …_CODES."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Dict(keys=keys):
                yield from (code for key in keys if key is not None for code in _codes_in(key))
            case ast.match_case(pattern=pattern):
                yield from _codes_in(pattern)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.endswith("_CODES"):
                yield from _codes_in(value)
            case ast.Compare(left=ast.Attribute(attr="code"), ops=[ast.Eq()], comparators=[right]) if (
                path.parent.name == "client" and path.name == "client.py"
            ):
                yield from _codes_in(right)


def handlers() -> dict[str, dict[RequestCode, str]]:
    """Who is asked -> code -> module that answers."""
    found: dict[str, dict[RequestCode, str]] = {}
    rooms = {"broker": "broker/*.py", "name server": "namesrv/processor.py", "client": "client/cli*.py"}
    for place, pattern in rooms.items():
        found[place] = {}
        for path in sorted((ROOT / "ha").glob(pattern)):
            for code in _answered(path):
                found[place].setdefault(code, str(path.relative_to(ROOT)))
    return found


def codes() -> str:
    """Request codes with who answers them, response codes, and statuses of a put."""
    answered = handlers()
    rows = []
    for code in RequestCode:
        places = [f"{place}: `{found[code]}`" for place, found in answered.items() if code in found]
        rows.append(f"| {code.value} | {code.name} | {'; '.join(places) or '–'} |")
    responses = [f"| {code.value} | {code.name} |" for code in ResponseCode]
    statuses = [
        f"| {status.name} | {status.response_code.value} {status.response_code.name} "
        f"| {'yes' if status.is_stored else 'no'} | {status.remark} |"
        for status in PutStatus
    ]
    texts = _notes(causes.Cause)
    reasons = [f"| {cause.value} | {texts.get(cause.name, '')} |" for cause in causes.Cause]
    parts = [
        (CODES_HEAD, rows),
        (STATUSES_HEAD, statuses),
        (CAUSES_HEAD, reasons),
        (RESPONSES_HEAD, responses),
    ]
    return MADE + "".join(head + "\n".join(lines) + "\n" for head, lines in parts)


def _notes(kind: type[Enum]) -> dict[str, str]:
    """Member -> the docstring that stands below it in the source, on one line."""
    [body] = [
        node.body
        for node in ast.parse(inspect.getsource(inspect.getmodule(kind) or kind)).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    return {
        node.targets[0].id: " ".join(following.value.value.split())
        for node, following in pairwise(body)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
        and isinstance(following.value.value, str)
    }


# ---- metrics


def metrics() -> str:
    """Every metric, and what its labels may be."""
    shown = {
        "every": "every node",
        "master": "masters",
        "slave": "slaves",
        "member": "members of a failover group",
        "tls": "nodes with TLS",
        "acl": "nodes with access control",
        "process": "every node",
    }
    rows = []
    for each in METRICS:
        labelled = ", ".join(f"`{label}`" for label in each.labels)
        rows.append(f"| `{each.name}` | {each.kind} | {labelled} | {shown[each.where]} | {each.help} |")
    labels = [f"| `{name}` | {text} |" for name, text in LABELS.items()]
    return MADE + METRICS_HEAD + "\n".join(rows) + "\n" + LABELS_HEAD + "\n".join(labels) + "\n"


# ---- errors


def error_tree() -> str:
    """Every exception that is raised on purpose, each under what it is a kind of."""
    lines: list[str] = []

    def add(kind: type[errors.HalogError], depth: int) -> None:
        text = " ".join((kind.__doc__ or "").split())
        fields = _fields(kind)
        told = f" Fields: {', '.join(f'`{name}`' for name in fields)}." if fields else ""
        lines.append(f"{'    ' * depth}- **{kind.__name__}**: {text}{told}")
        for each in kind.__subclasses__():
            if each.__module__ == "ha.errors":
                add(each, depth + 1)

    add(errors.HalogError, 0)
    return MADE + ERRORS_HEAD + "\n".join(lines) + "\n"


def _fields(kind: type[errors.HalogError]) -> list[str]:
    if "__init__" not in vars(kind):
        return []
    code = kind.__init__.__code__
    return list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


# ---- all


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "commands.md": commands,
    DOCS / "reference" / "codes.md": codes,
    DOCS / "reference" / "errors.md": error_tree,
    DOCS / "reference" / "metrics.md": metrics,
    DOCS / "security.md": lambda: permissions_table.render((DOCS / "security.md").read_text()),
    DOCS / "configuration.md": lambda: configuration_table.render((DOCS / "configuration.md").read_text()),
}


def main() -> None:
    """Write them all."""
    for path, page in PAGES.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(page())


if __name__ == "__main__":
    main()
