"""Where an error came from, for the log, which must hold no words of a caller."""

from __future__ import annotations

import traceback

OWN_PACKAGES = ("model", "seqserve", "service")


def place_of(error: BaseException) -> str:
    """Kind and place of an error: `KeyError in service.planning.plan:87 < ...`, innermost first.

    Neither its message, which may hold a caller's text, nor the paths of files. Of frames in other
    packages only the innermost is named.
    """
    frames = [
        (frame.f_globals.get("__name__", "?"), frame.f_code.co_name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    told = [f for f in frames[:-1] if f[0].split(".")[0] in OWN_PACKAGES] + frames[-1:]
    places = [f"{module}.{function}:{line}" for module, function, line in reversed(told)]
    return f"{type(error).__name__} in {' < '.join(places) or 'no frame'}"
