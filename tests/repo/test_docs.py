"""The pages under docs/ lead somewhere, and say what the sources say."""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agl_fast
from support.paths import ROOT

DOCS = ROOT / "docs"
PACKAGE = ROOT / "python" / "agl_fast"
PAGES = sorted(DOCS.glob("*.md"))
LINKING = [
    *PAGES,
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "SECURITY")),
    *(ROOT / name / "README.md" for name in ("benchmarks", "examples")),
]

LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
# What logging, str.format and the pages themselves write in the place of a value.
PLACEHOLDER = re.compile(r"%[.\d]*[a-z]|\{[^{}]*\}|…")


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As code hosts and MyST make them of headings."""
    found = set()
    for heading in HEADING.findall(prose(page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower()
        kept = [c for c in text if c in " -_" or unicodedata.category(c)[0] in "LN"]
        found.add("".join(kept).replace(" ", "-"))
    return found


def table_rows(page: Path) -> Iterator[list[str]]:
    """The cells of every row of every table, without the lines that only rule."""
    for line in prose(page.read_text()).splitlines():
        if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for path, anchor in LINK.findall(prose(page.read_text())):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}" if anchor else path)
    assert broken == []


def test_every_page_is_in_the_contents() -> None:
    index = (DOCS / "index.md").read_text()
    listed = re.findall(r"```{toctree}\n(?::[^\n]*\n)*\n(.*?)```", index, re.DOTALL)
    assert sorted(" ".join(listed).split()) == [p.stem for p in PAGES if p.stem != "index"]


def test_examples_are_python() -> None:
    for page in PAGES:
        for example in re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(), re.S | re.M):
            lines = example[1].splitlines(keepends=True)
            ast.parse("".join(line.removeprefix(example[0]) for line in lines), str(page))


def test_example_of_concepts_gives_the_rows_of_its_figures() -> None:
    example = re.search(r"```python\n(.*?)```", (DOCS / "concepts.md").read_text(), re.DOTALL)
    assert example is not None
    assert example[1].count("assert ") == 4
    exec(compile(example[1], "concepts.md", "exec"), {})


@pytest.mark.filterwarnings("ignore")  # of verl, vLLM and what they import
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("page", "begins", "ends"),
    [("configuration", "algorithm = VERL(", ")\n```"), ("sql_agent", "SETTINGS = ", "\n\nif")],
)
def test_settings_compose(page: str, begins: str, ends: str, device: str) -> None:
    pytest.importorskip("verl", reason="needs the extra [cpu] or [verl]")
    from agl_fast.verl.config import compose

    example = (DOCS / f"{page}.md").read_text().partition(f"\n{begins}")[2].partition(ends)[0]
    config = compose(ast.literal_eval(example), device=device).config
    assert config.agentlightning.trace_aggregator.level == "trajectory"


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_every_key_of_the_configuration_stands_with_its_default() -> None:
    yaml = pytest.importorskip("yaml")
    expected = dict(
        leaves(yaml.safe_load((PACKAGE / "verl" / "config" / "config.yaml").read_text()))
    )
    found = {}
    for cells in table_rows(DOCS / "configuration.md"):
        if len(cells) == 3 and re.fullmatch(r"`[\w.]+`", cells[0]):
            found[cells[0].strip("`")] = yaml.safe_load(cells[1].strip("`"))
            assert cells[2], cells
    assert found == expected


def test_every_key_that_moved_stands_with_its_place() -> None:
    yaml = pytest.importorskip("yaml")
    entries = yaml.safe_load((PACKAGE / "verl" / "config" / "renamed_keys.yaml").read_text())
    expected = {
        f"`{entry['old']}`": f"`{entry['new']}`" if "new" in entry else f"none: {entry['why']}"
        for entry in entries
    }
    text = (DOCS / "migration.md").read_text()
    table = text[text.index("| old key |") :]
    assert dict(re.findall(r"^\| (`[^`]+`) \| (.*?) \|$", table, re.MULTILINE)) == expected


def test_every_public_name_is_in_the_reference() -> None:
    headings = HEADING.findall((DOCS / "api.md").read_text())
    assert sorted(set(agl_fast.__all__) - {"__version__"} - set(headings)) == []


def test_benchmarks_of_the_readme_are_in_the_table_of_performance() -> None:
    of_readme, of_performance = (
        [cells for cells in table_rows(page) if len(cells) == 3 and cells[2].endswith("×")]
        for page in (ROOT / "README.md", DOCS / "performance.md")
    )
    assert of_readme
    assert [cells for cells in of_readme if cells not in of_performance] == []


def test_files_of_the_architecture_exist() -> None:
    cells = [cell for row in table_rows(DOCS / "architecture.md") for cell in row]
    paths = [code for cell in cells for code in CODE.findall(cell)]
    paths = [path for path in paths if "/" in path or path.endswith((".py", ".pyi", ".yaml"))]
    assert len(paths) > 20
    missing = [path for path in paths if not any((top / path).exists() for top in (PACKAGE, ROOT))]
    assert missing == []


def texts_of(source: Path) -> Iterator[str]:
    """Every text in a Python file, with … for what is put in."""
    for node in ast.walk(ast.parse(source.read_text())):
        yield from texts_of_node(node)


def texts_of_node(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield PLACEHOLDER.sub("…", node.value)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )


def is_said(message: str, texts: list[str]) -> bool:
    parts = [re.escape(part) for part in message.split("…") if part.strip()]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_quoted_messages_are_in_the_sources() -> None:
    texts = [text for source in sorted(PACKAGE.rglob("*.py")) for text in texts_of(source)]
    quoted = []
    messages = False
    for cells in table_rows(DOCS / "troubleshooting.md"):
        if "`" not in cells[0] and cells[-1] in ("fix", "what it means", "what helps"):
            messages = cells[0] != "symptom" and not cells[0].startswith("kind")
        elif messages and not cells[0].startswith(("pip:", "Hugging Face:")):
            quoted += CODE.findall(cells[0])
    assert len(quoted) > 50
    assert [message for message in quoted if not is_said(message, texts)] == []


# What an agent reads of these comes behind words of another message.
DETAILS = {"BadAnswerError", "NoTokenIdsError"}
REPLIES = {
    "replies.error",
    "replies.raw_error",
    "replies.error_event",
    "self._fail",
    "self._refuse",
}


def messages_to_agents() -> Iterator[str]:
    """What the proxy answers itself: texts of its replies, and of the errors that become one."""
    sources = [ast.parse(path.read_text()) for path in (PACKAGE / "proxy").rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(source)]
    errors = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    named = {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets = [each.id for each in node.targets if isinstance(each, ast.Name)]
            if "message" in targets:
                yield from texts_in(node.value, named)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_error = name in errors - DETAILS and name.endswith("Error")
            if is_error or name in REPLIES:
                for argument in node.args:
                    yield from texts_in(argument, named)


def texts_in(node: ast.AST, named: dict[str, ast.AST]) -> Iterator[str]:
    if isinstance(node, ast.Name) and node.id in named:
        yield from texts_in(named[node.id], {})
    elif isinstance(node, ast.Constant | ast.JoinedStr):
        yield from texts_of_node(node)
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts_in(child, named)


def test_what_the_proxy_tells_agents_is_in_troubleshooting() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    section = page[page.index("## Proxy errors") :]
    section = section[: section.index("\n## ")]
    quoted = [each for row in section.splitlines() for each in CODE.findall(row.split(" | ")[0])]
    quoted = [each for each in quoted if len(each.split()) > 2]
    messages = {text for text in messages_to_agents() if len(text.split()) > 2}
    assert len(messages) > 30
    missing = [
        text
        for text in messages
        if not any(is_said(each, [text]) for each in quoted if each != "…")
    ]
    assert sorted(missing) == []


def test_citation_names_the_version() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    for key, quote in (("version", '"'), ("license", '"')):
        value = re.search(rf'^{key} = "(.*)"', project, re.MULTILINE)
        assert value is not None
        assert re.search(rf"^{key}: {quote}?{re.escape(value[1])}{quote}?$", citation, re.M), key
