"""The web page in a headless Chromium: CHROMIUM names the browser, else the usual names are tried."""

import json
import os
import shutil

import pytest
from conftest import KEY, MODEL, weather_tool
from playwright.sync_api import expect, sync_playwright

# Nothing of the browser's own goes to the network. Its profile is an empty folder that Playwright makes.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser():
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"]
    path = next(filter(None, (shutil.which(n) for n in names if n)), None)
    assert path, "install a Chromium, or name one in CHROMIUM"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server)
    page.locator("#settings > summary").click()
    page.fill("#key", KEY)
    page.fill("#temperature", "0")
    page.locator("#key").blur()
    expect(page.locator("#model")).to_have_text(MODEL)
    yield page
    assert not complaints
    page.close()


def shoot(page, name):
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}.png")


def ask(page, text):
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_have_text("Send", timeout=60_000)
    expect(page.locator(".turn.assistant").last.locator(".meta")).not_to_be_empty()


def test_chat(page):
    ask(page, "What is 12 + 30?")
    turn = page.locator(".turn.assistant").last
    expect(turn.locator(":scope > .text")).to_contain_text("42")
    expect(turn.locator("details")).to_be_visible()
    expect(turn.locator(".meta")).to_contain_text("tok/s")
    expect(page.locator("#g-speed")).to_contain_text("tok/s")
    shoot(page, "chat")
    ask(page, "What is 5 + 6?")
    assert page.locator(".turn.assistant").count() == 2
    expect(page.locator(".meta").last).not_to_contain_text(" 0 cached")


def test_markup_is_shown_as_text(page):
    ask(page, "<img src=x onerror=alert(1)> hello")
    expect(page.locator(".turn.user")).to_contain_text("<img src=x")
    assert page.locator("#log img").count() == 0


def test_tools(page):
    page.fill("#tools", json.dumps([weather_tool()]))
    page.locator("#tools").blur()
    ask(page, "What is the weather in Paris?")
    call = page.locator(".call").first
    expect(call).to_contain_text("get_weather")
    expect(call).to_contain_text("Paris")
    shoot(page, "tools")
    call.locator("textarea").fill("sunny, 21 degrees")
    page.get_by_text("Send results").click()
    expect(page.locator("#send")).to_have_text("Send", timeout=60_000)
    expect(page.locator(".turn.assistant").last.locator(".meta")).not_to_be_empty()


def test_errors_are_told(page):
    page.fill("#temperature", "-1")
    page.locator("#temperature").blur()
    page.fill("#prompt", "x")
    page.locator("#send").click()
    expect(page.locator(".error")).to_contain_text("temperature")
    shoot(page, "error")
