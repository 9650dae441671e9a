// The keyboard: everything can be reached with Tab; these are short ways.

const PAGES = { t: "/", i: "/inbox", q: "/fleet" };

let going = false;

function step(by) {
  const rows = [...document.querySelectorAll("a.row")];
  const at = rows.indexOf(document.activeElement);
  const next = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by))];
  next?.focus();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target.closest("input, textarea, select, dialog[open]")) return;
  if (going && PAGES[event.key]) {
    location.assign(PAGES[event.key]);
  } else if (event.key === "g") {
    going = true;
    setTimeout(() => (going = false), 1000);
    return;
  } else if (event.key === "/") {
    const search = document.getElementById("search");
    if (!search) return;
    event.preventDefault();
    search.focus();
    search.select();
  } else if (event.key === "j" || event.key === "k") {
    step(event.key === "j" ? 1 : -1);
  } else if (event.key === "?") {
    document.getElementById("help").showModal();
  }
  going = false;
}

export function begin() {
  document.addEventListener("keydown", pressed);
}
