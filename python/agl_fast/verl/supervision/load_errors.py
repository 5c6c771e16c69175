"""A weight sync that fails ends at once, with the cause, not with somebody's patience."""

from __future__ import annotations

import logging
import traceback
from typing import Any

logger = logging.getLogger(__name__)


class ReportsLoadErrors:
    """Mixin for vLLM worker extensions, in front of verl's.

    verl 0.9.1's sender waits for an answer to every bucket of weights, without a limit. A receiver
    that cannot load one raises and never answers. Here it answers the rest of the buckets without
    loading them, so that the sender comes to its end, where it asks for the receiver's result.
    Overrides a private method of verl; obsolete with a release whose receiver answers errors.
    """

    # A list while weights come in.
    weight_load_errors: list[str] | None = None

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """As verl's.

        Raises:
            RuntimeError: the model could not load the weights.
        """
        errors: list[str] = []
        self.weight_load_errors = errors
        try:
            super().update_weights_from_ipc(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.weight_load_errors = None
            # What verl does after loading may fail for the same reason, and says less.
            if errors:
                raise RuntimeError(f"vLLM cannot load the actor's weights: {errors[0]}")

    def _update_weights(self, *args: Any, **kwargs: Any) -> None:
        if self.weight_load_errors is None:  # on another way, whose errors pass
            super()._update_weights(*args, **kwargs)  # type: ignore[misc]
        elif not self.weight_load_errors:
            try:
                super()._update_weights(*args, **kwargs)  # type: ignore[misc]
            except Exception as error:
                logger.error("vLLM cannot load the actor's weights: %s", traceback.format_exc())
                # The receiver cannot close its shared memory while frames hold tensors in it.
                traceback.clear_frames(error.__traceback__)
                self.weight_load_errors.append(repr(error))
