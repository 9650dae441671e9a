// Elements made of text. Whatever comes from tasks goes through here and is never anything but text.

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function cut(text, most) {
  return text.length > most ? `${text.slice(0, most)}…` : text;
}

// Says something for a moment.
export function toast(text, bad = false) {
  const shown = element("p", { class: bad ? "toast bad" : "toast" }, text);
  if (bad) shown.setAttribute("role", "alert");
  document.getElementById("toasts").append(shown);
  setTimeout(() => shown.remove(), bad ? 8000 : 4000);
}
