"""Write what is generated from the schema of `agentlightning.*`.

The section `agentlightning` of config.yaml, and the tables of its keys in docs/configuration.md.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from agl_fast.verl.config.schema import GROUP, TABLES, AgentLightningKeys

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "python" / "agl_fast" / "verl" / "config" / "config.yaml"
PAGE = ROOT / "docs" / "configuration.md"
COMMENT_WIDTH = 100
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)[^)]*\)")


def generated() -> dict[Path, str]:
    """The text of each file, with its generated parts up to date."""
    return {CONFIG: _config(CONFIG.read_text()), PAGE: _page(PAGE.read_text())}


def _config(text: str) -> str:
    section = "\n".join([f"{GROUP}:", *_yaml_lines(AgentLightningKeys(), "  ")])
    pattern = rf"^{GROUP}:\n.*?(?=^\S)"  # up to the next section or its comment
    return _replace(pattern, f"{section}\n\n", text)


def _yaml_lines(group: BaseModel, indent: str) -> Iterator[str]:
    for i, (name, field) in enumerate(type(group).model_fields.items()):
        value = getattr(group, name)
        if i:
            yield ""
        yield from textwrap.wrap(
            _plain(_meaning(field)),
            COMMENT_WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_on_hyphens=False,
        )
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {_scalar(value)}"


def _page(text: str) -> str:
    for name, (group, prefix) in TABLES.items():
        rows = [
            f"| `{prefix}.{key}` | `{_scalar(field.default)}` | {_meaning(field)} |"
            for key, field in group.model_fields.items()
        ]
        # The head of a table is the page's own.
        pattern = rf"(?<=<!-- generated: {name} -->\n)(\|[^\n]*\n\| --- [^\n]*\n)(\|[^\n]*\n)*"
        text = _replace(pattern, rf"\1{_escaped(rows)}", text)
    return text


def _replace(pattern: str, replacement: str, text: str) -> str:
    replaced, n = re.subn(pattern, replacement, text, flags=re.MULTILINE | re.DOTALL)
    if n != 1:
        raise ValueError(f"{pattern!r} is {n} times in the file: expected once")
    return replaced


def _escaped(rows: list[str]) -> str:
    return "".join(f"{row}\n" for row in rows).replace("\\", r"\\")


def _meaning(field: Any) -> str:
    return " ".join(field.description.split())


def _plain(markdown: str) -> str:
    """Markdown as a comment: links are their text and the page."""
    return LINK.sub(r"\1 [docs/\2]", markdown)


def _scalar(value: object) -> str:
    """A default as YAML writes it."""
    text: str = yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")


def main() -> None:
    for path, text in generated().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
