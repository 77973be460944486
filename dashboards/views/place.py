"""The page that a person looks at: what came of a write is shown there, and forgotten when the person leaves it."""

from __future__ import annotations

import streamlit as st

_PLACE, _EXPECTED = "fleetpulse.place", "fleetpulse.place.expected"
RESULT = ".result"
"""End of the keys of the session with what came of a write."""


def enter(page: str, identity: str) -> None:
    """Forgets the results of another page or subject. page: in the address.   identity: `id` in the address."""
    expected = st.session_state.get(_EXPECTED)
    if expected is not None and expected[0] == page:
        if expected[1] != identity:
            return  # a browser that is late gives the new page with the address of the page before
        st.session_state[_PLACE] = st.session_state.pop(_EXPECTED)
    if st.session_state.get(_PLACE) == (page, identity):
        return  # the page that asks for another one is drawn once more before the browser opens that
    st.session_state.pop(_EXPECTED, None)
    st.session_state[_PLACE] = page, identity
    for key in [key for key in st.session_state if isinstance(key, str) and _is_result(key)]:
        del st.session_state[key]


def expect(page: str, identity: str) -> None:
    """Keeps the results for a page that opens now, as the place where they belong."""
    st.session_state[_EXPECTED] = page, identity


def _is_result(key: str) -> bool:
    return key.startswith("fleetpulse.") and key.endswith(RESULT)
