"""Import paths that 0.1's documentation gave lead to the modules of today."""

import importlib
import sys

import pytest

import support.verl_trainer_imports  # noqa: F401
from agl_fast._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_same_module(old: str) -> None:
    new = importlib.import_module(MOVED[old])
    assert importlib.import_module(old) is new
    assert new.__name__ == new.__spec__.name == MOVED[old]


def test_modules_below_an_old_path_are_not_loaded_twice() -> None:
    from agl_fast.verl.credit.strategies import identical as by_old_path

    from agl_fast.training.credit.strategies import identical

    assert by_old_path is identical
    assert sys.modules["agl_fast.verl.credit.strategies"].__name__ == identical.__module__


def test_other_unknown_modules_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("agl_fast.verl.no_such_module")
