// Elements without markup: whatever a run holds becomes text, never HTML. And the address.

const SVG = "http://www.w3.org/2000/svg";

// h("a", { class: "name", href: "#/run/x", onclick: f }, "text", node, null)
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

// An element that is only described, for what is drawn many times a second: `patch` changes what
// there is into it, and as a child of `h` it is made.
export const el = (tag, properties, ...children) => ({ tag, properties, children });
export const svgEl = (tag, properties, ...children) => ({ tag, properties, children, isSvg: true });

const isShown = (value) => value !== null && value !== undefined && value !== false;
const made = (one) => (one.tag ? fillIn(one) : one);

function fillIn(one) {
  const element = one.isSvg ? document.createElementNS(SVG, one.tag) : document.createElement(one.tag);
  patch(element, one.children);
  setProperties(element, one.properties ?? {});
  return element;
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (!isShown(value)) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter(isShown).map(made));
  return element;
}

// Makes `box` hold these descriptions and texts: nodes stay, and of them only what differs is touched.
export function patch(box, ...wanted) {
  let known = box.firstChild;
  for (const one of wanted.flat(3)) {
    if (!isShown(one) || one === "") continue;
    const next = known?.nextSibling;
    if (!known) box.append(made(one));
    else if (!isPatched(known, one)) known.replaceWith(made(one));
    known = next;
  }
  while (known) {
    const next = known.nextSibling;
    known.remove();
    known = next;
  }
}

function isPatched(node, one) {
  if (node.localName !== one.tag) return false;
  if (one.tag) {
    patch(node, one.children);
    setProperties(node, one.properties ?? {});
  } else if (node.data !== String(one)) node.data = one;
  return true;
}

const PROPERTIES = new WeakMap(); // as they were set last

function setProperties(element, properties) {
  const known = PROPERTIES.get(element) ?? {};
  PROPERTIES.set(element, properties);
  for (const name in known) if (isShown(known[name]) && !isShown(properties[name])) setProperty(element, name, null);
  for (const name in properties) if (isShown(properties[name]) && properties[name] !== known[name]) setProperty(element, name, properties[name]);
  if ("checked" in properties) element.checked = Boolean(properties.checked); // whatever was clicked meanwhile
}

function setProperty(element, name, value) {
  if (name.startsWith("on")) element[name] = value;
  else if (value === null) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : value);
}

// table(["Method", ["Score"]], [[cell, cell], { class: "winner", cells }]): a heading in a list has
// figures under it. The first cell of a row names it.
export function table(heads, rows, kind) {
  const figure = (k) => (Array.isArray(heads[k]) ? "figure" : null);
  const head = heads.map((name, k) => h("th", { scope: "col", class: figure(k) }, name));
  const line = (row) => {
    const { cells, ...rest } = Array.isArray(row) ? { cells: row } : row;
    return h("tr", rest, cells.map((cell, k) => h(k ? "td" : "th", { scope: k ? null : "row", class: figure(k) }, cell)));
  };
  return h("div", { class: "scroll" }, h("table", { class: kind }, h("thead", null, h("tr", null, head)), h("tbody", null, rows.map(line))));
}

// Makes `box` hold these, and leaves alone what says the same: it keeps the focus, a selection, and a
// click that has begun.
export function refill(box, ...children) {
  refillWith(box, [...h("div", null, ...children).childNodes]);
}

const ACTING = "a, button, input, select, details"; // what these do goes with what they say

function refillWith(box, fresh) {
  fresh.forEach((node, k) => {
    const known = box.childNodes[k];
    if (!known) box.append(node);
    else if (known.isEqualNode(node)) return;
    else if (node.childElementCount && !node.matches(ACTING) && known.cloneNode().isEqualNode(node.cloneNode())) refillWith(known, [...node.childNodes]);
    else known.replaceWith(node);
  });
  while (box.childNodes.length > fresh.length) box.lastChild.remove();
}

export const section = (title, ...children) => h("section", null, h("h2", null, title), children);
export const lead = (sentence) => h("p", { class: "lead" }, prose(sentence));
// What is folded away is made when it is first opened: `make` gives its nodes.
export function folded(summary, make) {
  const details = h("details", null, h("summary", null, summary));
  let made = make;
  const fillIn = () => details.open && details.childElementCount === 1 && details.append(...[made()].flat(3).filter(Boolean));
  details.addEventListener("toggle", fillIn);
  details.remake = (next) => {
    made = next;
    while (details.childElementCount > 1) details.lastChild.remove();
    fillIn();
  };
  return details;
}

// The same with other nodes: it stays open, and its summary keeps the focus.
export function refold(box, summary, make) {
  const known = box.querySelector(":scope > details");
  if (known) known.remake(make);
  else box.replaceChildren(folded(summary, make));
}

export const figure = (title, chart) => h("figure", null, h("figcaption", null, title), chart.box ?? chart);
export const facts = (pairs) => h("dl", { class: "facts" }, pairs.map(([term, detail]) => h("div", null, h("dt", null, term), h("dd", null, detail))));
export const choice = (label, options, value, onchange) => h("select", { "aria-label": label, onchange: (e) => onchange(e.target.value) }, options.map(([v, t]) => h("option", { value: v, selected: v === value }, t)));

// The address is the state: #/run/demo?tab=events&kind=candidate
export function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decode);
  return { parts, query: new URLSearchParams(query ?? "") };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function address(parts, query) {
  const pairs = Object.entries(query ?? {}).flatMap(([k, v]) => [v].flat().map((one) => [k, one]));
  const kept = pairs.filter(([, v]) => v !== "" && v !== null && v !== undefined);
  const tail = kept.length ? `?${new URLSearchParams(kept)}` : "";
  return `#/${parts.map(encodeURIComponent).join("/")}${tail}`;
}

// A value of the address that is one of these; of any other the first.
export function placed(name, values) {
  const given = place().query.get(name);
  return values.includes(given) ? given : values[0];
}

// Changes some values of the address in place: the view stays, the link to it changes.
export function note(values) {
  const { parts, query } = place();
  const known = Object.fromEntries([...query.keys()].map((name) => [name, query.getAll(name)]));
  const next = { ...known, ...values };
  history.replaceState(history.state, "", address(parts, next));
}

export function runLink(id, query) {
  return address(["run", id], query);
}

// The pages that there are, beside the name; `selected` are the runs that the list then selects.
export const brandLine = (here, selected) => h("nav", { class: "brand", "aria-label": "Pages" }, "Rookery", ["runs", "fleet", "service"].map((one) => h("a", { href: address([one], one === "runs" && { sel: selected ?? [] }), "aria-current": one === here ? "page" : null }, one)));

// At most one call per frame.
export function perFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

export function later(work, milliseconds) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...values), milliseconds);
  };
}

// A sentence with `code` in it.
export const prose = (text) => (typeof text === "string" ? text.split(/`([^`\n]+)`/).map((part, k) => (k % 2 ? h("code", null, part) : part)) : text);

// A text as it is; of a very long one the rest is folded away: browsers stand still at it.
const MOST_SHOWN = 20000;
export const longText = (kind, text) => h("div", null, h("pre", { class: kind }, text.slice(0, MOST_SHOWN)), text.length > MOST_SHOWN && folded(`${text.length - MOST_SHOWN} more characters`, () => h("pre", { class: kind }, text.slice(MOST_SHOWN))));

// A sentence where something would be, and an error with what to do about it.
export const emptyNote = (sentence) => h("p", { class: "empty" }, prose(sentence));
export const errorNote = (error) => h("p", { class: "trouble", role: "alert" }, prose(error?.message ?? String(error)));

// When what was changed is on the screen: asking for more at once would take the processor from that.
export const drawn = () => new Promise((done) => {
  requestAnimationFrame(() => setTimeout(done));
  setTimeout(done, 200); // a hidden page draws nothing
});
