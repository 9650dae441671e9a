// The events of a task, of which there may be very many: only the rows that are seen are in the page, and only what is looked at is
// asked for. Events are numbered 1..n without gaps, so a number is a place.

import { cut, element } from "./text.js";

const ROW = 26;
const PAGE = 200;
// How many pages are kept.
const KEPT = 40;
// How many rows are drawn beyond what is seen.
const MORE = 8;

export class Events {
  constructor(root) {
    this.task = root.dataset.task;
    this.total = Number(root.dataset.last);
    this.list = root.querySelector(".rows");
    this.detail = root.querySelector(".chosen");
    this.all = element("div", { class: "all", role: "presentation" });
    this.list.append(this.all);
    this.pages = new Map();
    this.asked = new Set();
    this.drawn = new Map();
    this.chosen = null;
    this.planned = false;
    this.list.addEventListener("scroll", () => this.plan(), { passive: true });
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.all.addEventListener("click", (event) => {
      const row = event.target.closest("[data-seq]");
      if (row) this.choose(Number(row.dataset.seq));
    });
    new ResizeObserver(() => this.plan()).observe(this.list);
    this.grow(true);
  }

  // The end is shown, and stays in sight for as long as nobody scrolls away from it.
  get atEnd() {
    return this.list.scrollTop + this.list.clientHeight >= this.list.scrollHeight - ROW * 1.5;
  }

  grow(toEnd) {
    this.all.style.height = `${this.total * ROW}px`;
    if (toEnd) this.list.scrollTop = this.list.scrollHeight;
    this.plan();
  }

  // One more, as it happens.
  add(event) {
    const toEnd = this.atEnd;
    this.keep(event);
    if (event.seq <= this.total) {
      this.plan();
      return;
    }
    this.total = event.seq;
    this.grow(toEnd);
  }

  keep(event) {
    const number = Math.floor((event.seq - 1) / PAGE);
    if (!this.pages.has(number)) this.pages.set(number, new Map());
    this.pages.get(number).set(event.seq, event);
  }

  find(seq) {
    return this.pages.get(Math.floor((seq - 1) / PAGE))?.get(seq);
  }

  plan() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  draw() {
    const first = Math.max(1, Math.floor(this.list.scrollTop / ROW) + 1 - MORE);
    const seen = Math.ceil(this.list.clientHeight / ROW) + 2 * MORE;
    const last = Math.min(this.total, first + seen);
    for (const [seq, row] of this.drawn) {
      if (seq < first || seq > last) {
        row.remove();
        this.drawn.delete(seq);
      }
    }
    for (let seq = first; seq <= last; seq += 1) {
      const event = this.find(seq);
      if (!event) this.ask(Math.floor((seq - 1) / PAGE));
      this.row(seq, event);
    }
    this.forget(Math.floor((first - 1) / PAGE));
    if (this.drawn.has(this.chosen)) this.list.setAttribute("aria-activedescendant", `event-${this.chosen}`);
    else this.list.removeAttribute("aria-activedescendant");
  }

  row(seq, event) {
    let row = this.drawn.get(seq);
    if (!row) {
      row = element("div", { id: `event-${seq}`, class: "event", role: "option", "data-seq": seq, "aria-posinset": seq });
      row.style.top = `${(seq - 1) * ROW}px`;
      this.drawn.set(seq, row);
      this.all.append(row);
    }
    row.setAttribute("aria-setsize", this.total);
    row.setAttribute("aria-selected", String(seq === this.chosen));
    if (event && !row.dataset.filled) {
      row.dataset.filled = "1";
      row.classList.add(event.type.split(".")[0].replace(/[^a-z_]/gi, ""));
      row.replaceChildren(
        element("span", { class: "seq" }, String(seq)),
        element("span", { class: "at" }, event.time.slice(11, 23).replace("Z", "")),
        element("span", { class: "type" }, event.type),
        element("span", { class: "said" }, said(event)),
      );
    } else if (!event) {
      row.replaceChildren(element("span", { class: "seq" }, String(seq)), element("span", { class: "at" }, "…"));
    }
  }

  async ask(number) {
    if (this.asked.has(number)) return;
    this.asked.add(number);
    try {
      let after = number * PAGE;
      // An answer can be short when events are large.
      for (;;) {
        const end = Math.min(this.total, (number + 1) * PAGE);
        if (after >= end) break;
        const answer = await fetch(`/tasks/${this.task}/log?after=${after}&limit=${end - after}`);
        if (!answer.ok) break;
        const { events } = await answer.json();
        if (events.length === 0) break;
        for (const event of events) this.keep(event);
        after = events.at(-1).seq;
        this.plan();
      }
    } catch {
      // Asked for again when it is looked at again.
    } finally {
      this.asked.delete(number);
    }
  }

  // What is far from what is seen can be asked for again.
  forget(near) {
    if (this.pages.size <= KEPT) return;
    const far = [...this.pages.keys()].sort((one, other) => Math.abs(other - near) - Math.abs(one - near));
    for (const number of far.slice(0, this.pages.size - KEPT)) this.pages.delete(number);
  }

  choose(seq) {
    this.chosen = seq;
    const event = this.find(seq);
    this.detail.hidden = !event;
    this.detail.textContent = event ? JSON.stringify(event, null, 2) : "";
    this.plan();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.total, End: this.total }[event.key];
    if (by === undefined || this.total === 0) return;
    event.preventDefault();
    const from = this.chosen ?? (by > 0 && event.key !== "End" ? this.total - 1 : this.total + 1);
    const seq = Math.min(this.total, Math.max(1, from + by));
    const top = (seq - 1) * ROW;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    else if (top + ROW > this.list.scrollTop + this.list.clientHeight) {
      this.list.scrollTop = top + ROW - this.list.clientHeight;
    }
    this.choose(seq);
  }
}

// An event in a few words.
function said({ type, step, data }) {
  const words = [];
  if (type === "progress") {
    if (data?.total_step > 0) words.push(`${data.step}/${data.total_step}`);
    words.push(data?.message ?? data?.status ?? "");
  } else {
    if (step) words.push(step);
    if (data?.attempt > 1) words.push(`try ${data.attempt}`);
    if (data?.took_ms !== undefined) words.push(`${data.took_ms} ms`);
    if (data?.error?.message) words.push(data.error.message);
    else if (words.length === 0 && data !== null) words.push(JSON.stringify(data));
  }
  return cut(words.join(" · "), 300);
}
