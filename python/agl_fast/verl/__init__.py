"""Training with verl: the only package of agl_fast that imports verl, Ray or an HTTP client."""
