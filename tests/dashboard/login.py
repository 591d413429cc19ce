"""Logging in over HTTP, as a browser does."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import urlencode

import httpx

_HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')
TOKEN = "a-token-of-the-operator"


def form_token(html: str) -> str:
    """The token of a page's form."""
    found = re.search(r'name="form_token" value="([^"]+)"', html)
    assert found is not None, html
    return found[1]


async def post_token(client: httpx.AsyncClient, token: str, wanted: str = "/dashboard/topics") -> httpx.Response:
    """Opens the login form and sends it."""
    form = await client.get("/dashboard/login")
    content = urlencode({"token": token, "next": wanted, "form_token": form_token(form.text)})
    return await client.post("/dashboard/login", content=content.encode())


async def act(client: httpx.AsyncClient, name: str, **values: str) -> httpx.Response:
    """Fills in the form of an action, and returns the page after it."""
    form = await client.get(f"/dashboard/act/{name}")
    return await post_form(client, name, {**values, "form_token": form_token(form.text)})


async def confirm(client: httpx.AsyncClient, name: str, page: str, **values: str) -> httpx.Response:
    """Confirms what `page` asks to be confirmed, with the values of its form, or these."""
    shown = {name: unescape(value) for name, value in _HIDDEN.findall(page)}
    return await post_form(client, name, {**shown, **values, "confirmed": "1"})


async def post_form(client: httpx.AsyncClient, name: str, values: dict[str, str]) -> httpx.Response:
    return await client.post(f"/dashboard/act/{name}", content=urlencode(values).encode())
