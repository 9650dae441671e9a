// Keeps the page live: a stream says that something changed, and the page is asked for again, not more often than it can be
// made and shown.

import { parse, take } from "./morph.js";
import { tell } from "./time.js";

// The shortest time between two looks, ms.
const PAUSE = 250;
// Of the time, at most one part in so many is spent on looking.
const SHARE = 4;

let timer = null;
let looking = false;
let again = false;
let took = 0;

// Looks soon; several calls are one look.
export function refresh() {
  if (looking) again = true;
  else timer ??= setTimeout(look, Math.max(PAUSE, took * SHARE));
}

async function look() {
  timer = null;
  looking = true;
  const begun = performance.now();
  try {
    await now();
  } catch {
    // The server is away; the stream says so, and when it is back.
  } finally {
    took = Math.min(performance.now() - begun, 5000);
    looking = false;
    if (again) {
      again = false;
      refresh();
    }
  }
}

// Looks at once.
export async function now() {
  const asked = location.href;
  const answer = await fetch(asked, { headers: { Accept: "text/html" } });
  if (answer.redirected && new URL(answer.url).pathname === "/sign-in") {
    location.assign(answer.url);
    return;
  }
  // Elsewhere by now, or nothing that could be shown: what is there stays.
  if (!answer.ok || asked !== location.href) return;
  take(parse(await answer.text()));
  tell();
}

function show(state) {
  const pulse = document.getElementById("pulse");
  if (!pulse) return;
  pulse.dataset.state = state;
  pulse.lastElementChild.textContent = state === "on" ? "live" : "reconnecting";
}

// Follows a stream for as long as the page is looked at; comes back by itself, after the last number it saw.
export function follow(address, hear) {
  let source = null;
  let last = null;
  let lost = false;
  let wait = 1000;
  const open = () => {
    if (source || document.hidden) return;
    const url = new URL(address, location.origin);
    if (last) url.searchParams.set("after", last);
    source = new EventSource(url);
    source.onopen = () => {
      show("on");
      wait = 1000;
      if (lost) refresh();
      lost = false;
    };
    source.onmessage = ({ lastEventId, data }) => {
      if (lastEventId) last = lastEventId;
      hear(JSON.parse(data));
    };
    source.onerror = () => {
      show("lost");
      lost = true;
      // One that was cut off comes back by itself; one that was refused does not.
      if (source?.readyState === EventSource.CLOSED) {
        source = null;
        refresh();
        setTimeout(open, wait);
        wait = Math.min(wait * 2, 30000);
      }
    };
  };
  // Browsers have few connections for each server; pages that nobody sees hold none.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else {
      lost = true;
      open();
    }
  });
  open();
}
