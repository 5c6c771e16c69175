"""Import this before agl_fast's trainer: what verl imports warns, and warnings are errors here."""

import warnings

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import verl.trainer.ppo.ray_trainer
    import verl.trainer.ppo.rollout_corr_helper  # noqa: F401
