"""The checkers share no code with halog."""

import ast
from pathlib import Path

HERE = Path(__file__).parent


def test_no_checker_imports_halog() -> None:
    judges = [path for path in HERE.glob("*.py") if not path.name.startswith("test_")]
    assert len(judges) > 10
    for path in judges:
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or ".")
        ours = {name for name in imported if name.startswith("tests.") and not name.startswith("tests.checkers")}
        assert not ours, (path.name, ours)
        assert not {name for name in imported if name.split(".")[0] == "ha"}, path.name
