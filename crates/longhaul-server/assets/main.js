// Begins everything that a page needs.

import * as actions from "./actions.js";
import { Events } from "./events.js";
import * as keys from "./keys.js";
import { follow, refresh } from "./live.js";
import { keepTelling, tell } from "./time.js";

// How often a page is looked at without being told to, ms: for what changes without an event.
const OFTEN = 2000;
const SELDOM = 15000;

const SCHEMES = ["system", "light", "dark"];

function theme() {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const tell = () => (button.textContent = `Theme: ${root.dataset.theme ?? "system"}`);
  button.addEventListener("click", () => {
    const next = SCHEMES[(SCHEMES.indexOf(root.dataset.theme ?? "system") + 1) % SCHEMES.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("theme", next);
    } catch {
      // Then it is for this page alone.
    }
    tell();
  });
  tell();
}

// What a model writes, while it does.
function writing() {
  const box = document.getElementById("writing");
  const text = box.querySelector(".text");
  let of = "";
  return {
    hear({ run, step, attempt, text: more }) {
      const now = `${run}/${step}/${attempt}`;
      if (now !== of) text.textContent = "";
      of = now;
      text.textContent = (text.textContent + more).slice(-20000);
      box.hidden = false;
    },
    end(event) {
      const over = event.type === "step.completed" || event.type === "step.failed" || event.type.startsWith("task.");
      if (over) box.hidden = true;
    },
  };
}

function task(root) {
  const events = new Events(root);
  const words = writing();
  return (event) => {
    if (event.type === "live") {
      words.hear(event);
      return;
    }
    words.end(event);
    events.add(event);
    refresh();
  };
}

function begin() {
  actions.begin();
  keys.begin();
  theme();
  tell();
  keepTelling();
  const { stream } = document.body.dataset;
  if (!stream) return;
  const events = document.getElementById("events");
  follow(stream, events ? task(events) : refresh);
  const due = (when) => !document.hidden && when() && refresh();
  setInterval(() => due(() => document.querySelector("rect.live:is(.work, .running, .undo)")), OFTEN);
  setInterval(() => due(() => document.querySelector(".plain-table")), OFTEN * 2);
  setInterval(() => due(() => true), SELDOM);
}

begin();
