"""A small sqlite database of books, and questions about it with the queries that answer them."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

SCHEMA = """\
CREATE TABLE authors (name TEXT, country TEXT);
CREATE TABLE books (title TEXT, author TEXT, year INTEGER, pages INTEGER);
"""
AUTHORS = [("Ada", "Peru"), ("Bo", "Kenya"), ("Cleo", "Peru"), ("Dan", "Japan")]
BOOKS = [
    ("Amber", "Ada", 1990, 210),
    ("Birch", "Ada", 2004, 95),
    ("Cedar", "Bo", 1990, 340),
    ("Dune", "Bo", 2011, 120),
    ("Ember", "Bo", 2011, 480),
    ("Fern", "Cleo", 2004, 260),
    ("Grove", "Dan", 1978, 150),
    ("Heath", "Dan", 2020, 305),
]

MAX_ROWS = 20
# A query that a model wrote may run for ever.
MAX_INSTRUCTIONS = 1_000_000
ALLOWED = {
    sqlite3.SQLITE_SELECT: None,
    sqlite3.SQLITE_READ: None,
    sqlite3.SQLITE_FUNCTION: frozenset(
        {"abs", "avg", "count", "length", "like", "lower", "max", "min", "round", "sum", "upper"}
    ),
}
# ValueError: the query is no text that sqlite takes.
FAILURES = (sqlite3.Error, sqlite3.Warning, ValueError)


@contextmanager
def database() -> Iterator[sqlite3.Connection]:
    """A copy of its own, which can only be read."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO authors VALUES (?, ?)", AUTHORS)
        connection.executemany("INSERT INTO books VALUES (?, ?, ?, ?)", BOOKS)
        connection.commit()
        connection.set_authorizer(authorise)
        connection.set_progress_handler(lambda: 1, MAX_INSTRUCTIONS)
        yield connection


def authorise(action: int, _: str | None, function: str | None, *__: str | None) -> int:
    functions = ALLOWED.get(action, frozenset())
    is_allowed = functions is None or function in functions
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def rows_of(query: str) -> list[tuple[Any, ...]]:
    """The first rows that a query gives.

    Raises:
        one of `FAILURES`: it cannot be run, may not, or takes too long.
    """
    with database() as connection:
        return connection.execute(query).fetchmany(MAX_ROWS)


def is_same_answer(query: str, expected: str) -> bool:
    """Whether both give the same rows, in the same order if the expected query asks for one."""
    try:
        found = rows_of(query)
    except FAILURES:
        return False
    wanted = rows_of(expected)
    return found == wanted if "ORDER BY" in expected else by_text(found) == by_text(wanted)


def by_text(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=repr)


def a_question(rng: random.Random) -> dict[str, Any]:
    author, country = rng.choice(AUTHORS)
    title, _, year, pages = rng.choice(BOOKS)
    question, query = rng.choice(
        [
            (
                f"How many books did {author} write?",
                f"SELECT count(*) FROM books WHERE author = '{author}'",
            ),
            (f"Who wrote {title}?", f"SELECT author FROM books WHERE title = '{title}'"),
            (
                f"Which books have more than {pages} pages?",
                f"SELECT title FROM books WHERE pages > {pages}",
            ),
            (
                f"What is the longest book of {year}?",
                f"SELECT title FROM books WHERE year = {year} ORDER BY pages DESC LIMIT 1",
            ),
            (
                f"How many books come from {country}?",
                "SELECT count(*) FROM books JOIN authors ON author = name "
                f"WHERE country = '{country}'",
            ),
        ]
    )
    return {"question": question, "query": query, "data_source": "sql"}
