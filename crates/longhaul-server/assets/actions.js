// What people do: forms that are sent without leaving the page, dialogs, and pages shown in one.

import { now, refresh } from "./live.js";
import { parse } from "./morph.js";
import { toast } from "./text.js";

async function send(form, button) {
  const body = new URLSearchParams(new FormData(form, button));
  const buttons = [...form.querySelectorAll("button")];
  for (const one of buttons) one.disabled = true;
  try {
    // Not form.action: a field may be called so.
    const answer = await fetch(form.getAttribute("action"), {
      method: "POST",
      headers: { Accept: "application/json" },
      body,
    });
    const told = await answer.json();
    if (!answer.ok) {
      toast(told.detail ?? told.title ?? "It did not work.", true);
      refresh();
      return;
    }
    done(form, told);
  } catch {
    toast("The server cannot be reached; try again.", true);
  } finally {
    for (const one of buttons) one.disabled = false;
  }
}

function done(form, told) {
  const dialog = form.closest("dialog");
  const leads = form.dataset.action === "go" || (!dialog && form.closest(".sheet"));
  if (leads) {
    location.assign(told.location);
    return;
  }
  toast(told.message);
  if (form.hasAttribute("data-clear")) form.reset();
  dialog?.close();
  now().catch(refresh);
}

// Shows the sheet of another page over this one.
async function sheet(address) {
  const dialog = document.getElementById("sheet");
  const answer = await fetch(address, { headers: { Accept: "text/html" } });
  const found = parse(await answer.text()).querySelector(".sheet");
  if (!found) {
    location.assign(address);
    return;
  }
  dialog.replaceChildren(document.adoptNode(found));
  if (!dialog.open) dialog.showModal();
}

function clicked(event) {
  if (event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const on = (selector) => event.target.closest(selector);
  if (on("dialog [data-close]")) {
    event.preventDefault();
    on("dialog").close();
  } else if (on("button[data-close]")) {
    history.back();
  } else if (on("a[data-sheet]")) {
    event.preventDefault();
    const { href } = on("a[data-sheet]");
    sheet(href).catch(() => location.assign(href));
  } else if (on("[data-dialog]")) {
    document.getElementById(on("[data-dialog]").dataset.dialog)?.showModal();
  }
}

// The filter of a list is in the address; changing it changes the list in place.
function filters(form) {
  let timer = null;
  const apply = () => {
    const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value.trim() !== ""));
    history.replaceState(null, "", query.size > 0 ? `/?${query}` : "/");
    now().catch(refresh);
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    apply();
  });
  form.addEventListener("change", apply);
  form.addEventListener("input", (event) => {
    if (event.target.type !== "search") return;
    clearTimeout(timer);
    timer = setTimeout(apply, 200);
  });
}

export function begin() {
  document.addEventListener("click", clicked);
  document.addEventListener("submit", (event) => {
    if (!event.target.matches("form[data-action]")) return;
    event.preventDefault();
    send(event.target, event.submitter);
  });
  const filter = document.getElementById("filter");
  if (filter) filters(filter);
}
