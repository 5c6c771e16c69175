"""What `python -m agl_fast analyze` predicts of `benchmarks.tree_update`, and what that measured.

`python -m benchmarks.tree_prediction [TRACE ...]`, after `python -m benchmarks.tree_update`. The
prediction counts operations alone, of the same rollouts and the same model.
"""

import argparse
import json
from collections.abc import Iterator

import numpy as np

from agl_fast.rows.levels import LEVELS
from agl_fast.rows.options import Limits
from agl_fast.tools.analyze.costs import flops
from agl_fast.tools.analyze.layouts import lay_out
from agl_fast.tools.analyze.model_shape import shape_of
from benchmarks import report
from benchmarks.conversations import for_agl_fast, load_traces
from benchmarks.tree_update import ROWS, batches, config_of, in_own_vocabulary
from benchmarks.workload import FULL, Size

# Of `tree_update`'s competitors: rows of one call are those of level transition.
COMPETITORS = {"transition": "calls", "trajectory": "merged", "tree": "trees"}


def predicted_flops(name: str, size: Size) -> dict[str, int]:
    """Of each competitor's gradient."""
    made, n_vocabulary = in_own_vocabulary(batches(name, size))
    ids = set(np.unique(made.calls.columns["rollout_id_list"]))
    rollouts = [each for each in for_agl_fast(load_traces(name)) if each.rollout_id in ids]
    for each in rollouts:
        each.calls = each.calls[: size.calls_of_updates]
    model = shape_of(config_of(n_vocabulary, size.layers_of_updates))
    return {
        COMPETITORS[level]: flops(
            lay_out(rollouts, level, Limits()).layout, model, recomputed=False
        )
        for level in LEVELS
    }


def compared(name: str) -> Iterator[str]:
    """A line of Markdown for each competitor that was measured against trees."""
    predicted = predicted_flops(name, FULL)
    measured = json.loads((report.RESULTS / f"tree_update_{name}.json").read_text())["cpu_seconds"]
    for competitor in ("calls", "merged"):
        if competitor in measured:
            ratio = predicted[competitor] / predicted["trees"]
            found = min(measured[competitor]) / min(measured["trees"])
            cells = (name, competitor, f"{ratio:.2f}", f"{found:.2f}", f"{ratio / found - 1:+.0%}")
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TRACE", help=", ".join(ROWS))
    names = parser.parse_args().names or list(ROWS)
    print(
        "| trace | against | predicted | measured | deviation |\n| --- | --- | ---: | ---: | ---: |"
    )
    for name in names:
        print("\n".join(compared(name)))


if __name__ == "__main__":
    main()
