"""The README's first example runs as written, and its files are there."""

import re

from support.paths import ROOT

README = (ROOT / "README.md").read_text()


def test_first_example_runs_and_asserts():
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    assert "assert " in example[1]
    exec(compile(example[1], "README.md", "exec"), {})


def test_every_relative_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
