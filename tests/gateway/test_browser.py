"""The live page in a real browser. Skipped without one: pip install playwright, and Debian's package chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muxserve.gateway.status import ui
from muxserve.gateway.usage.usage_log import UsageLog, Used
from muxserve.scheduling.residency_types import ResidencyRules, WakeCosts
from muxserve.spec import BudgetSpec, ResidencySpec, TenantSpec
from tests.gateway.playing import play
from tests.gateway.rig import Rig, Running
from tests.gateway.unit_specs import fleet_of, model
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.tiny_checkpoint import tiny_checkpoint

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Pages of this machine only; the sandbox wants rights that a container has not.
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(params=[(1400, "light"), (800, "dark"), (390, "light")], ids=["wide", "narrow", "phone"])
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty page, on which nothing may go wrong and which no other server may be asked for anything."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(1000 * PATIENCE)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith("http://127.0.0.1:") else None)
    yield page
    context.close()
    assert not wrong


def fits(page: Any) -> bool:
    """Whether nothing sticks out to the right of the window."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_the_fleet_is_drawn(page: Any, gateway: Running) -> None:
    page.goto(f"{gateway.url}/ui")
    row = page.locator("tr[data-model=beta]")
    row.locator("text=up").wait_for()
    unit = page.locator("section[data-unit=main]")
    unit.locator("text=12 / 1,000").first.wait_for()  # pages in use, and the quota
    # The jobs of the fake unit: something is painted in the lanes.
    painted = "c => new Set(c.getContext('2d').getImageData(160, 0, c.width - 160, c.height - 30).data).size > 8"
    canvas = unit.locator("canvas").element_handle()
    page.wait_for_function(painted, arg=canvas)
    assert fits(page)
    assert page.locator("text=changes need a key").count() == 1
    assert page.locator("button[title='remove the model']").count() == 0
    assert row.locator("td:visible").evaluate_all("all => all.every((td) => td.scrollWidth <= td.clientWidth + 1)")
    dark = page.evaluate("document.documentElement.dataset.theme")
    page.click("text=light / dark")
    assert page.evaluate("document.documentElement.dataset.theme") != dark


def test_the_chat_streams(page: Any, gateway: Running) -> None:
    page.goto(f"{gateway.url}/ui#chat")
    page.select_option("select[aria-label=Model]", "beta")
    mark = gateway.mark()
    page.fill("textarea", play("streamed to the page", hold=4))
    page.keyboard.press("Enter")
    gateway.wait("held", mark)
    answer = page.locator(".turn.assistant")
    answer.locator(".text", has_text="str").wait_for()  # before the answer has ended
    assert page.locator("button:text-is('Stop')").count() == 1
    gateway.tell_unit("go")
    answer.locator(".text", has_text="streamed to the page").wait_for()
    answer.locator("text=first token after").wait_for()
    assert fits(page)
    # What was said before is part of what is asked next.
    mark = gateway.mark()
    page.fill("textarea", play("and again", hold=2))
    page.click("button:text-is('Send')")
    gateway.wait("held", mark)
    page.click("button:text-is('Stop')")
    page.locator("text=stopped").wait_for()
    gateway.tell_unit("go")
    page.click("text=Fleet")
    page.locator("tr[data-model=beta]").wait_for()
    page.click("text=Chat")
    page.locator(".turn").nth(3).wait_for()
    page.click("text=New chat")
    assert page.locator(".turn").count() == 0


def test_a_tenant_that_is_no_admin_may_chat(page: Any, guarded: Running) -> None:
    page.goto(f"{guarded.url}/ui#chat")
    page.fill("input[type=password]", "wrong")
    page.click("button.main")
    page.locator("text=This key does not open the page.").wait_for()
    page.fill("input[type=password]", "second-key")
    page.click("button.main")
    page.fill("textarea", play("with a key"))
    page.keyboard.press("Enter")
    page.locator(".turn.assistant .text", has_text="with a key").wait_for()
    assert fits(page)


def test_logs_are_shown(page: Any, gateway: Running) -> None:
    logs = Path(gateway.unit_spec.run_dir) / "logs"
    logs.mkdir(exist_ok=True)
    (logs / "scheduler.log").write_text("<b>all</b> is well\n")
    page.goto(f"{gateway.url}/ui")
    page.click("summary")
    page.select_option("select[aria-label=Log]", "scheduler")
    page.locator("pre.log", has_text="<b>all</b> is well").wait_for()
    assert fits(page)


def test_a_key_opens_the_page_and_its_buttons(page: Any, guarded: Running) -> None:
    page.goto(f"{guarded.url}/ui")
    page.fill("input[type=password]", "wrong")
    page.click("button.main")
    page.locator("text=This key does not open the page.").wait_for()
    page.fill("input[type=password]", "first-key")
    page.click("button.main")
    page.locator("tr[data-model=alpha]").wait_for()
    page.click("button[title='one replica more']")
    page.locator(".banner.bad", has_text="has ended").wait_for()  # there is no controller behind it
    # What the fleet would refuse: to have none of its only model, on its only unit.
    assert page.locator("button[title='one replica less']").is_disabled()
    assert page.locator("button[title='remove the model'], button:text-is('drain')").count() == 0
    assert fits(page)


def test_where_memory_decides_nobody_sets_replicas(page: Any, guarded: Running) -> None:
    before = guarded.fleet
    costs = {model.name: WakeCosts(1 << 20, 1 << 20, 1.0) for model in before.models}
    residency = {unit.name: ResidencySpec(ResidencyRules(1 << 30), costs) for unit in before.units}
    guarded.change(msgspec.structs.replace(before, residency=residency, generation=before.generation + 1))
    try:
        page.goto(f"{guarded.url}/ui")
        page.fill("input[type=password]", "first-key")
        page.click("button.main")
        page.locator("th:text-is('change'), td[data-of='']").first.wait_for(state="attached")
        assert page.locator("tr[data-model=alpha]").count() == 1
        assert page.locator("button[title^='one replica'], button:text-is('drain')").count() == 0
    finally:
        guarded.change(msgspec.structs.replace(before, generation=before.generation + 2))


@pytest.fixture(scope="module")
def teams(rig: Rig, gateway: Running) -> Running:
    """A gateway with tenants, of which one has nearly used up its budget."""
    directory = rig.directory / "usage"
    directory.mkdir()
    fleet = fleet_of(
        directory, [model("alpha", tiny_checkpoint())], unit="usage", port=free_port(), api_keys=["admins-key"]
    )
    file = str(directory / "usage.sqlite")
    usage = UsageLog(file)
    for day in range(1, 29):
        usage._new[f"2026-01-{day:02}", "research", "alpha", "file-0123abcd"] = Used(10, 100 * day, 5, 20)
    usage.add("research", "alpha", Used(3, 700, 0, 250), "file-0123abcd")
    usage.close()
    fleet = msgspec.structs.replace(
        fleet,
        tenants=(
            TenantSpec("research", (), budgets=(BudgetSpec("day", 1000), BudgetSpec("month", 50000, "alpha"))),
            TenantSpec("web", (sha256(b"webs-key").hexdigest(),)),
        ),
        usage_file=file,
    )
    running = rig.start(fleet)
    running.engines()
    return running


def test_usage_budgets_and_keys_are_shown(page: Any, teams: Running) -> None:
    page.goto(f"{teams.url}/ui#usage")
    page.fill("input[type=password]", "admins-key")
    page.click("button.main")
    row = page.locator("tr[data-tenant=research]")
    row.locator("text=950").wait_for()
    budget = page.locator("tr[data-budget=research]").first
    assert "1,000" in budget.inner_text()
    page.select_option("select[aria-label=Rows]", "key")
    row.locator("text=file-0123abcd").wait_for()
    assert fits(page)
    # A key is made, shown once, and revoked.
    page.fill("input[aria-label=Tenant]", "reserch")
    page.click("text=Make a key")
    page.locator(".banner.bad", has_text="did you mean 'research'?").wait_for()
    page.fill("input[aria-label=Tenant]", "research")
    page.fill("input[aria-label='Name of the key']", "of the page")
    page.click("text=Make a key")
    text = page.locator(".banner.good code").inner_text()
    made = page.locator("tr[data-key]", has_text=text[-4:])
    made.locator("text=active").wait_for()
    assert fits(page)
    page.on("dialog", lambda dialog: dialog.accept())
    made.locator("button", has_text="revoke").click()
    made.locator("text=revoked").wait_for()
    assert text not in page.locator("table").last.inner_text()
    # A tenant sees its own usage, and no keys.
    page.evaluate("sessionStorage.setItem('muxserve-key', 'webs-key')")
    page.reload()
    page.locator("text=Nothing was used").wait_for()
    assert page.locator("text=Make a key").count() == 0
    assert fits(page)


def test_every_file_of_the_page_is_used(browser: Any, gateway: Running) -> None:
    context = browser.new_context()
    page, loaded = context.new_page(), set()
    page.on("response", lambda answer: loaded.add(answer.url.partition("/ui/")[2]) if answer.ok else None)
    page.goto(f"{gateway.url}/ui")
    page.locator("tr[data-model=beta]").wait_for(timeout=1000 * PATIENCE)
    files = {str(path.relative_to(ui.FILES)) for path in ui.FILES.rglob("*") if path.suffix in (".js", ".css")}
    assert files <= loaded
    context.close()
