"""One name means one thing: no two public classes of the package have the same name."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ddpforge"


def test_no_public_class_name_is_defined_twice() -> None:
    files = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(path.relative_to(PACKAGE)))
    assert len(files) > 300
    assert {name: places for name, places in files.items() if len(places) > 1} == {}
