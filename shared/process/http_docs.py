"""Serves the page `/docs` of an HTTP API from installed files: it needs no other host."""

from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse

ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
"""Files of Swagger UI that the page loads, from the package fastapi-offline."""


def add_docs(app: FastAPI) -> None:
    """Show ``app``'s own description of itself, with a form for every route."""

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url=app.openapi_url or "",
            title=app.title,
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="/docs/favicon.png",
        )
        # Nobody's page may lay it under its own and have a person press its buttons.
        page.headers["content-security-policy"] = "frame-ancestors 'none'"
        return page

    @app.get("/docs/{name}", include_in_schema=False)
    def asset(name: str) -> FileResponse:
        if name not in ASSETS:
            raise HTTPException(404, f"/docs has no {name[:100]!r}")
        path = Path(str(files("fastapi_offline") / "static" / name))
        return FileResponse(path, media_type=ASSETS[name])
