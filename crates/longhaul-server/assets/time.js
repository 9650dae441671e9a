// Times in words, kept up to date by the server's clock.

const ahead = Date.parse(document.body.dataset.now) - Date.now();

export function now() {
  return Date.now() + (Number.isFinite(ahead) ? ahead : 0);
}

function rough(seconds) {
  if (seconds < 60) return `${seconds}s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}m`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)}h ${String(Math.floor(seconds / 60) % 60).padStart(2, "0")}m`;
  return `${Math.floor(seconds / 86400)}d ${Math.floor(seconds / 3600) % 24}h`;
}

function words(at) {
  const seconds = Math.trunc((now() - at) / 1000);
  if (seconds === 0) return "now";
  return seconds > 0 ? `${rough(seconds)} ago` : `in ${rough(-seconds)}`;
}

const HOUR = { hour: "2-digit", minute: "2-digit", hour12: false };

// In the time zone of who looks, with the day when it is another one.
function clock(at) {
  const time = new Date(at);
  const today = time.toDateString() === new Date(now()).toDateString();
  return today
    ? time.toLocaleTimeString("en", { ...HOUR, second: "2-digit" })
    : time.toLocaleString("en", { ...HOUR, month: "short", day: "numeric" });
}

export function tell(root = document) {
  for (const time of root.querySelectorAll("time[data-clock]")) {
    const text = clock(Date.parse(time.dateTime));
    if (time.textContent !== text) time.textContent = text;
  }
  for (const time of root.querySelectorAll("time[data-ago]")) {
    const text = words(Date.parse(time.dateTime));
    if (time.textContent !== text) time.textContent = text;
  }
}

export function keepTelling() {
  setInterval(() => document.hidden || tell(), 1000);
}
