"""What agl_fast's engines for trees are called."""

ENGINE = "agl_fast_tree"
"""The attention function in transformers (`override_config.attn_implementation`), and the vendor
under which verl finds the engines."""
