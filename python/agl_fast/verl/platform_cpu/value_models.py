"""verl's value models with the attention that the configuration names."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForTokenClassification
from verl.utils import model as verl_model

FLASH_ATTENTION = "flash_attention_2"


def load_value_models_as_configured() -> None:
    """Let a critic's `override_config.attn_implementation` count, in this process.

    Monkeypatch of `verl.utils.model.load_valuehead_model` (verl 0.9.1), which asks for
    flash_attention_2 whatever the configuration says, so that no critic starts where flash-attn is
    not installed. With flash_attention_2 configured, verl's own function is called. Obsolete with a
    verl that reads the key for critics, too.
    """
    if getattr(verl_model.load_valuehead_model, "reads_configuration", False):
        return
    load_with_flash_attention = verl_model.load_valuehead_model

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        attention = model_config._attn_implementation
        if attention in (None, FLASH_ATTENTION):
            return load_with_flash_attention(
                local_path, torch_dtype, model_config, trust_remote_code
            )
        try:
            return AutoModelForTokenClassification.from_pretrained(
                local_path,
                torch_dtype=torch_dtype,
                config=model_config,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
        except ValueError as error:
            raise ValueError(
                f"critic.model.path={local_path!r} with attn_implementation={attention!r}: "
                f"transformers has no token classifier for model type {model_config.model_type!r} "
                f"({error}); expected another model for the critic, or flash-attn to be installed "
                f"and critic.model.override_config.attn_implementation={FLASH_ATTENTION}"
            ) from error

    load.reads_configuration = True  # type: ignore[attr-defined]
    verl_model.load_valuehead_model = load
