"""GET /: the page to play with a model, from static files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

PAGE = Path(__file__).parents[1] / "page"

NO_CACHE = {"cache-control": "no-cache"}
"""Ask each time whether it is still the same: files of two versions do not work together."""

router = APIRouter()


@router.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """The page. Its links are relative: it asks the server under whatever path it was found."""
    return FileResponse(PAGE / "index.html", headers=NO_CACHE)


class PageFiles(StaticFiles):
    """What the page is made of."""

    def __init__(self) -> None:
        super().__init__(directory=PAGE)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(NO_CACHE)
        return response
