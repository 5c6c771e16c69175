"""Values of JSON, with every kind of text and number that the json module reads and writes."""

from __future__ import annotations

from hypothesis import strategies as st

TEXT = st.text(st.characters() | st.sampled_from('"\\/\n\x1f\x7f\ud800é€😀'), max_size=12)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**30, -(10**400), 1e300, -0.0])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
