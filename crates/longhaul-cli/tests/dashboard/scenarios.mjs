// What people do with the dashboard, played in a real browser: `node scenarios.mjs SCENARIO`. The environment says where everything is
// (SERVER, PLAYWRIGHT, CHROMIUM); a line on standard output asks the test that started this for something (`restart`), and a
// line on standard input says that it is done. Every scenario also fails by an error on the console of a page, and by a request to
// another host.

import assert from "node:assert/strict";
import { readFileSync, mkdtempSync, mkdirSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

const { SERVER, PLAYWRIGHT, CHROMIUM, SCREENSHOTS, OPERATOR, VIEWER } = process.env;
const require = createRequire(join(PLAYWRIGHT, "package.json"));
const { chromium } = require(PLAYWRIGHT);
const AXE = readFileSync(join(PLAYWRIGHT, "../axe-core/axe.min.js"), "utf8");

const PATIENCE = 60_000;
const PHONE = { width: 375, height: 812 };
const DESK = { width: 1280, height: 860 };

// ------------------------------------------------------------------ the server

async function api(method, path, body) {
  const headers = { "content-type": "application/json" };
  if (OPERATOR) headers.authorization = `Bearer ${OPERATOR}`;
  const answer = await fetch(SERVER + path, { method, headers, body: body && JSON.stringify(body) });
  assert.ok(answer.ok, `${method} ${path}: ${answer.status} ${await answer.clone().text()}`);
  return answer.status === 204 ? null : answer.json();
}

const submit = async (handler, input, more = {}) => (await api("POST", "/v1/tasks", { handler, input, ...more })).id;

async function until(what, look) {
  const end = Date.now() + PATIENCE;
  for (;;) {
    const found = await look();
    if (found) return found;
    assert.ok(Date.now() < end, `${what} does not happen`);
    await new Promise((wake) => setTimeout(wake, 25));
  }
}

const inState = (id, ...states) =>
  until(`${id} becomes ${states}`, async () => {
    const task = await api("GET", `/v1/tasks/${id}`);
    return states.includes(task.state) && task;
  });

const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

// Asks the test for something, and waits until it is done.
async function please(what) {
  console.log(what);
  assert.equal((await answers.next()).value, "done");
}

// ------------------------------------------------------------------ the browser

const profile = mkdtempSync(join(tmpdir(), "dashboard-"));
const trouble = [];
const browsers = [];

async function open(options = {}) {
  const context = await chromium.launchPersistentContext(mkdtempSync(join(profile, "profile-")), {
    executablePath: CHROMIUM,
    headless: true,
    viewport: DESK,
    ignoreDefaultArgs: ["--enable-automation"],
    args: [
      "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--no-proxy-server",
    ],
    ...options,
  });
  browsers.push(context);
  context.setDefaultTimeout(PATIENCE);
  const page = context.pages()[0] ?? (await context.newPage());
  page.on("console", (message) => {
    // A server that was killed on purpose cannot be reached for a moment, and the browser says so.
    const away = /ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|ERR_INCOMPLETE_CHUNKED|ERR_EMPTY_RESPONSE|ERR_SOCKET/.test(message.text());
    if (message.type() === "error" && !(away && page.awayIsFine)) trouble.push(`console: ${message.text()}`);
  });
  page.on("pageerror", (error) => trouble.push(`error: ${error.stack ?? error}`));
  page.on("request", (request) => {
    if (!request.url().startsWith(`${SERVER}/`)) trouble.push(`request to ${request.url()}`);
  });
  return page;
}

// Marks the page; whoever loads it anew loses the mark.
const mark = (page) => page.evaluate(() => (globalThis.marked = true));
const isMarked = (page) => page.evaluate(() => globalThis.marked === true);

const isLive = (page) => page.locator('#pulse[data-state="on"]').waitFor();

// Presses Tab until this has the focus.
async function tabTo(page, selector) {
  for (let pressed = 0; pressed < 200; pressed += 1) {
    await page.keyboard.press("Tab");
    if (await page.evaluate((wanted) => document.activeElement?.matches(wanted), selector)) return;
  }
  assert.fail(`${selector} cannot be reached with Tab`);
}

// The rows of the list of events that are in the page, by number.
const drawn = (page) =>
  page.$$eval(".event", (rows) => rows.map((row) => [Number(row.dataset.seq), row.querySelector(".type")?.textContent]));

async function accessible(page, what) {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document));
  const serious = violations.filter(({ impact }) => impact === "serious" || impact === "critical");
  const told = serious.map(({ id, nodes }) => `${id}: ${nodes.map(({ html, failureSummary }) => `${html} ${failureSummary}`).join("\n  ")}`);
  assert.deepEqual(told, [], `${what} is not accessible`);
}

// Those that the documentation shows.
const PICTURES = ["tasks", "task", "inbox", "queues", "task-dark", "undone-dark", "tasks-phone", "task-phone"];

async function picture(page, name) {
  if (!SCREENSHOTS || !PICTURES.includes(name)) return;
  mkdirSync(SCREENSHOTS, { recursive: true });
  await page.screenshot({ path: join(SCREENSHOTS, `${name}.png`) });
}

// ------------------------------------------------------------------ the scenarios

async function watch() {
  const id = await submit("publish", { page: "hello" });
  const page = await open();
  page.awayIsFine = true;
  await page.goto(`${SERVER}/tasks/${id}`);
  await page.getByRole("heading", { name: "Publish hello?" }).waitFor();
  assert.match(await page.locator("#why").textContent(), /approve or deny 'Publish hello\?'/);
  await isLive(page);
  await mark(page);

  await please("restart");
  await page.locator('#pulse[data-state="on"]').waitFor();
  await page.getByRole("button", { name: "Approve" }).click();
  await page.locator("h1 ~ .badge.completed").waitFor();
  assert.match(await page.locator("#why").textContent(), /has completed/);
  assert.ok(await isMarked(page), "the page was loaded anew");

  // Every event once and in order, also those from before the restart.
  const { events } = await api("GET", `/v1/tasks/${id}/export`);
  const shown = new Map();
  const list = page.locator("#events .rows");
  for (const to of [1, 0.5, 0]) {
    await list.evaluate((rows, part) => (rows.scrollTop = rows.scrollHeight * part), to);
    const last = to === 1 ? events.length : Math.min(events.length, Math.floor(events.length * to) + 5);
    await page.locator(`#event-${last} .type`).waitFor();
    for (const [seq, type] of await drawn(page)) shown.set(seq, type);
  }
  assert.deepEqual(events.map(({ seq }) => shown.get(seq)), events.map(({ type }) => type));
  const lanes = await page.$$eval(".lane .name", (names) => names.map((name) => name.textContent.trim()));
  assert.ok(lanes.some((name) => name.startsWith("go_live")), `${lanes}`);
}

async function writing() {
  const id = await submit("devops", "How full is the disk?");
  const page = await open();
  await page.goto(`${SERVER}/tasks/${id}`);
  const box = page.locator("#writing");
  // What was written before anyone looked is not told again.
  await isLive(page);
  await page.locator(".talk .model").getByText("under way").waitFor();
  await mark(page);
  await fetch(`${process.env.MODEL}/go`, { method: "POST" });
  await page.locator("h1 ~ .badge.completed").waitFor();
  await page.locator(".talk .model").getByText("The disk is half empty.").waitFor();
  await box.waitFor({ state: "hidden" });
  const saw = await page.evaluate(() => document.querySelector("#writing .text").textContent);
  assert.match(saw, /half empty\./);
  assert.ok(await isMarked(page), "the page was loaded anew");
}

async function keyboard() {
  const id = await submit("devops", "The disk is full. Fix it.");
  await inState(id, "waiting");
  const page = await open();
  await page.goto(SERVER);
  await page.locator(`#row-${id}`).waitFor();
  await page.keyboard.press("j");
  await page.keyboard.press("Enter");
  await page.waitForURL(`${SERVER}/tasks/${id}`);
  await page.getByRole("heading", { name: "Messages and tool calls" }).waitFor();
  assert.equal(await page.locator('.plan [aria-current="step"]').textContent(), "Clean the logs");
  await page.keyboard.press("g");
  await page.keyboard.press("i");
  await page.waitForURL(`${SERVER}/inbox`);
  await isLive(page);
  await mark(page);
  const card = page.locator(".ask.approval");
  assert.match(await card.textContent(), /clean_logs[^]*write_local|write_local[^]*clean_logs/);
  assert.match(await card.locator("pre").textContent(), /"days": 7/);
  await tabTo(page, '.ask input[name="reason"]');
  await page.keyboard.type("the old ones can go");
  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  await page.getByText("Nothing waits for you").waitFor();
  assert.ok(await isMarked(page), "the page was loaded anew");
  await inState(id, "completed");
  const { approvals } = await api("GET", `/v1/tasks/${id}/approvals`);
  assert.equal(approvals[0].reason, "the old ones can go");
  // What is skipped to, and what a key explains.
  await page.keyboard.press("?");
  await page.getByRole("dialog").getByText("queues and workers").waitFor();
  await page.keyboard.press("Escape");
  // The list of events goes by arrows.
  await page.goto(`${SERVER}/tasks/${id}`);
  await tabTo(page, "#events .rows");
  await page.keyboard.press("End");
  await page.keyboard.press("ArrowUp");
  const seq = Number(await page.locator('.event[aria-selected="true"] .seq').textContent());
  const { last_seq: last } = await api("GET", `/v1/tasks/${id}`);
  assert.equal(seq, last - 1);
  assert.equal(JSON.parse(await page.locator("#events .chosen").textContent()).seq, seq);
}

async function fork() {
  const id = await submit("deploy", { app: "shop", ok: "no" });
  const page = await open();
  await page.goto(`${SERVER}/tasks/${id}`);
  await page.locator("h1 ~ .badge.failed").waitFor();
  // It was tried twice, and what it did was undone.
  await until("the undo is drawn", () => page.locator("rect.undo").count());
  assert.ok((await page.locator("rect.failed").count()) >= 2);
  await page.getByRole("button", { name: "Fork…" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("From step").selectOption("start_container");
  const input = dialog.getByLabel("Input, as JSON");
  await input.fill("{ nonsense");
  await dialog.getByRole("button", { name: "Fork" }).click();
  await page.getByRole("alert").getByText("'input'").waitFor();
  // What was refused is said on the console as well.
  trouble.length = 0;
  await input.fill('{"app": "shop", "ok": "yes"}');
  await dialog.getByRole("button", { name: "Fork" }).click();
  await page.waitForURL((url) => url.pathname.startsWith("/tasks/") && !url.pathname.endsWith(id));
  await page.locator("h1 ~ .badge.completed").waitFor();
  const forked = await api("GET", `/v1/tasks/${new URL(page.url()).pathname.split("/").pop()}`);
  assert.deepEqual([forked.fork_of, forked.input, forked.state], [id, { app: "shop", ok: "yes" }, "completed"]);
}

async function bulk() {
  const late = new Date(Date.now() + 3_600_000).toISOString();
  const many = await Promise.all([...Array(30).keys()].map((n) => submit("deploy", { app: `app-${n}`, ok: "yes" }, { run_at: late })));
  const other = await submit("deploy", { app: "keep", ok: "yes" }, { run_at: late });
  const page = await open();
  await page.goto(SERVER);
  await isLive(page);
  await mark(page);
  await page.getByLabel("Search in the input").fill("app-");
  await until("the list is filtered", async () => (await page.locator(`#row-${other}`).count()) === 0);
  assert.equal(new URL(page.url()).searchParams.get("q"), "app-");
  assert.equal(await page.locator(".tasks tbody tr").count(), 30);
  await page.getByRole("link", { name: "Cancel all…" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByRole("heading", { name: "Cancel 30 tasks?" }).waitFor();
  await dialog.getByRole("button", { name: "Cancel 30 tasks" }).click();
  await page.getByText("30 tasks cancelled.").waitFor();
  await until("the rows say so", async () => (await page.locator(".tasks .badge.cancelled").count()) === 30);
  assert.ok(await isMarked(page), "the page was loaded anew");
  assert.equal((await api("GET", `/v1/tasks/${other}`)).state, "pending");
  for (const id of many) assert.equal((await api("GET", `/v1/tasks/${id}`)).state, "cancelled");
}

async function events() {
  const { TASK, LAST } = process.env;
  const last = Number(LAST);
  const page = await open();
  await page.goto(`${SERVER}/tasks/${TASK}`);
  const rowsFrom = async (from, to) =>
    until(`events ${from} to ${to} are drawn`, async () => {
      const rows = new Map(await drawn(page));
      for (let seq = from; seq <= to; seq += 1) if (!rows.get(seq)) return false;
      return rows.size;
    });
  // The end comes first.
  assert.ok((await rowsFrom(last - 5, last)) < 80, "only what is seen is in the page");
  assert.equal(new Map(await drawn(page)).get(last), "task.completed");
  const list = page.locator("#events .rows");
  await list.scrollIntoViewIfNeeded();
  for (const part of [0, 0.5, 0.25, 0.9]) {
    await list.evaluate((rows, to) => (rows.scrollTop = rows.scrollHeight * to), part);
    const first = Math.max(1, Math.ceil(last * part) + 1);
    assert.ok((await rowsFrom(first, first + 5)) < 80, "only what is seen is in the page");
  }
  // A long way in many small steps, as a wheel does it: no frame takes long.
  const frames = await list.evaluate(async (rows) => {
    const took = [];
    let before = performance.now();
    for (let step = 0; step < 120; step += 1) {
      rows.scrollTop -= 400;
      await new Promise(requestAnimationFrame);
      const now = performance.now();
      took.push(now - before);
      before = now;
    }
    return took.sort((one, other) => one - other);
  });
  const [half, most] = [frames[60], frames[114]];
  console.log(`a frame took ${half.toFixed(1)} ms, 95 of 100 less than ${most.toFixed(1)} ms`);
  assert.ok(half < 60 && most < 250, `frames took ${half} and ${most} ms`);
  const nodes = await page.evaluate(() => document.querySelectorAll("*").length);
  assert.ok(nodes < 6000, `the page has ${nodes} elements`);
}

// Something of everything, so that the pages have something to show.
async function furnish() {
  const agent = await submit("devops", "The disk of web-3 is full. Free some room and say what you did.", { tags: { team: "platform" } });
  const deployed = [];
  for (const app of ["shop", "search", "billing", "mail", "login", "images", "feed", "ads"]) {
    deployed.push(await submit("deploy", { app, ok: app === "billing" ? "no" : "yes" }, { tags: { team: "web" } }));
  }
  const publish = await submit("publish", { page: "pricing" }, { priority: 8 });
  const release = await submit("release", { version: "2.4.1" });
  const late = new Date(Date.now() + 5_400_000).toISOString();
  await submit("deploy", { app: "nightly", ok: "yes" }, { run_at: late });
  // One that runs, and one that a limit holds back because of it.
  const backup = await submit("backup", { db: "orders" }, { concurrency_key: "orders-db" });
  await inState(backup, "running");
  await submit("backup", { db: "orders" }, { concurrency_key: "orders-db" });
  await api("PUT", "/v1/schedules/nightly-deploy", { cron: "30 2 * * *", time_zone: "Europe/Berlin", task: { handler: "deploy", input: { app: "nightly", ok: "yes" } } });
  await inState(agent, "waiting");
  await inState(publish, "waiting");
  await inState(release, "waiting");
  for (const id of deployed) await inState(id, "completed", "failed");
  return { agent, failed: deployed[2] };
}

const background = (page) =>
  page.evaluate(() => getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g).slice(0, 3).map(Number));

async function looks() {
  const { agent, failed } = await furnish();
  const pages = { tasks: "/", task: `/tasks/${agent}`, undone: `/tasks/${failed}`, inbox: "/inbox", queues: "/fleet" };
  const page = await open({ deviceScaleFactor: 1.5 });
  for (const [scheme, suffix] of [["light", ""], ["dark", "-dark"]]) {
    await page.setViewportSize(DESK);
    await page.emulateMedia({ colorScheme: scheme });
    for (const [name, path] of Object.entries(pages)) {
      await page.goto(SERVER + path);
      await isLive(page);
      const [red] = await background(page);
      assert.ok(scheme === "dark" ? red < 60 : red > 200, `${name} is not ${scheme}: ${red}`);
      await accessible(page, `${name} (${scheme})`);
      await picture(page, `${name}${suffix}`);
    }
  }
  await page.emulateMedia({ colorScheme: "light" });
  await page.setViewportSize(PHONE);
  for (const [name, path] of Object.entries(pages)) {
    await page.goto(SERVER + path);
    await isLive(page);
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(width <= PHONE.width, `${name} is ${width} pixels wide on a phone`);
    await accessible(page, `${name} (phone)`);
    await picture(page, `${name}-phone`);
  }
  // The switch goes before the system, also on the next page.
  await page.setViewportSize(DESK);
  await page.goto(SERVER);
  const button = page.getByRole("button", { name: /^Theme/ });
  await button.click();
  await button.click();
  assert.equal(await button.textContent(), "Theme: dark");
  await page.goto(`${SERVER}/inbox`);
  assert.ok((await background(page))[0] < 60, "what was chosen is kept");
  // A dialog is accessible, too.
  await page.goto(`${SERVER}/tasks/${failed}`);
  await page.getByRole("button", { name: "Fork…" }).click();
  await accessible(page, "a dialog");
}

async function roles() {
  const id = await submit("publish", { page: "secret" });
  await inState(id, "waiting");
  const page = await open();
  await page.goto(`${SERVER}/tasks/${id}`);
  await page.waitForURL(/\/sign-in/);
  await accessible(page, "signing in");
  await page.getByLabel("Token").fill("lh_wrong");
  await page.keyboard.press("Enter");
  await page.getByRole("alert").getByText("unknown").waitFor();
  // What was refused is said on the console as well.
  trouble.length = 0;
  await page.getByLabel("Token").fill(VIEWER);
  await page.keyboard.press("Enter");
  // One arrives where one wanted to go.
  await page.waitForURL(`${SERVER}/tasks/${id}`);
  await isLive(page);
  assert.equal(await page.getByRole("button", { name: /Approve|Cancel/ }).count(), 0, "a viewer sees no actions");
  await page.getByRole("button", { name: "Sign out" }).click();
  await page.waitForURL(/\/sign-in/);
  await page.getByLabel("Token").fill(OPERATOR);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.waitForURL(`${SERVER}/`);
  await page.goto(`${SERVER}/inbox`);
  await page.getByLabel("Reason").fill("not now");
  await page.getByRole("button", { name: "Deny" }).click();
  await page.getByText("Nothing waits for you").waitFor();
  const { approvals } = await api("GET", `/v1/tasks/${id}/approvals`);
  assert.deepEqual([approvals[0].status, approvals[0].decided_by, approvals[0].reason], ["denied", "the operator", "not now"]);
}

// ------------------------------------------------------------------ all of it

const scenarios = { watch, writing, keyboard, fork, bulk, events, looks, roles };

try {
  await scenarios[process.argv[2]]();
  assert.deepEqual(trouble, [], "a page complains");
} catch (error) {
  console.error(error);
  if (trouble.length > 0) console.error("pages complain:", trouble);
  process.exitCode = 1;
} finally {
  await Promise.all(browsers.map((browser) => browser.close()));
  rmSync(profile, { recursive: true, force: true, maxRetries: 10, retryDelay: 100 });
  process.exit();
}
