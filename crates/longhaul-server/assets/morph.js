// Takes over what changed between the page that is shown and the same page as the server has it now. What did not change stays
// as it is: focus, selection, scroll, what is open and what was typed. Children with an id are recognised by it; what carries
// data-keep belongs to scripts and is left alone.

const policy = globalThis.trustedTypes?.createPolicy("longhaul", { createHTML: (page) => page }) ?? {
  createHTML: (page) => page,
};

// A whole page of this server.
export function parse(page) {
  return new DOMParser().parseFromString(policy.createHTML(page), "text/html");
}

// Takes over every part of the page that is live.
export function take(page) {
  for (const part of document.querySelectorAll("[data-live]")) {
    const newer = page.getElementById(key(part));
    if (newer) morph(part, newer);
  }
  if (document.title !== page.title) document.title = page.title;
}

// What a person opened stays open.
function isTheirs(node, name) {
  return name === "open" && (node.nodeName === "DETAILS" || node.nodeName === "DIALOG");
}

function morph(old, newer) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== newer.data) old.data = newer.data;
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE || old.hasAttribute("data-keep")) return;
  for (const { name, value } of newer.attributes) {
    if (!isTheirs(old, name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (!isTheirs(old, name) && !newer.hasAttribute(name)) old.removeAttribute(name);
  }
  children(old, newer);
}

// Not node.id: of a form with a field of that name, it is the field.
function key(node) {
  return node.getAttribute?.("id") ?? "";
}

function same(old, newer) {
  return old.nodeType === newer.nodeType && old.nodeName === newer.nodeName && key(old) === key(newer);
}

// The next element, when it is the one that is wanted: the text before it is what is left around something that is gone.
function skipText(place, wanted) {
  let next = place;
  while (next?.nodeType === Node.TEXT_NODE) next = next.nextSibling;
  if (!next || !same(next, wanted)) return place;
  while (place !== next) {
    const after = place.nextSibling;
    place.remove();
    place = after;
  }
  return place;
}

function children(old, newer) {
  const wanted = new Set([...newer.children].map(key).filter(Boolean));
  for (const child of [...old.children]) {
    if (key(child) && !wanted.has(key(child))) child.remove();
  }
  const known = new Map([...old.children].filter(key).map((child) => [key(child), child]));
  let place = old.firstChild;
  for (const child of [...newer.childNodes]) {
    if (child.nodeType === Node.ELEMENT_NODE && !key(child)) place = skipText(place, child);
    let match = key(child) ? known.get(key(child)) : null;
    if (match && match.nodeName !== child.nodeName) match = null;
    if (!match && !key(child) && place && same(place, child)) match = place;
    if (match) {
      if (match === place) place = place.nextSibling;
      else old.insertBefore(match, place);
      morph(match, child);
    } else {
      old.insertBefore(document.adoptNode(child), place);
    }
  }
  while (place) {
    const after = place.nextSibling;
    place.remove();
    place = after;
  }
}
