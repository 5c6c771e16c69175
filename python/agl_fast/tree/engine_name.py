"""The name of agl_fast's engines for trees."""

ENGINE = "agl_fast_tree"
"""Name of the attention function in transformers (`override_config.attn_implementation`) and vendor
of the engines in verl."""
