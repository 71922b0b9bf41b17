// Builds elements from text, never from HTML, whatever a run holds; reads and writes the address.

const SVG = "http://www.w3.org/2000/svg";

// h("a", { class: "name", href: "#/run/x", onclick: f }, "text", node, null)
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

// A description of an element, for parts drawn many times a second: `patch` updates existing nodes
// to match it, and `h` makes it if it is a child.
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

// Updates the children of `box` to these descriptions and texts; changes only differences.
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

const PROPERTIES = new WeakMap(); // properties that each element was last given

function setProperties(element, properties) {
  const known = PROPERTIES.get(element) ?? {};
  PROPERTIES.set(element, properties);
  for (const name in known) if (isShown(known[name]) && !isShown(properties[name])) setProperty(element, name, null);
  for (const name in properties) if (isShown(properties[name]) && properties[name] !== known[name]) setProperty(element, name, properties[name]);
  if ("checked" in properties) element.checked = Boolean(properties.checked); // overrides clicks since then
}

function setProperty(element, name, value) {
  if (name.startsWith("on")) element[name] = value;
  else if (value === null) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : value);
}

// table(["Method", ["Score"]], [[cell, cell], { class: "winner", cells }]): a heading in an array is
// a column of numbers. The first cell of a row is its heading.
export function table(heads, rows, kind) {
  const figure = (k) => (Array.isArray(heads[k]) ? "figure" : null);
  const head = heads.map((name, k) => h("th", { scope: "col", class: figure(k) }, name));
  const line = (row) => {
    const { cells, ...rest } = Array.isArray(row) ? { cells: row } : row;
    return h("tr", rest, cells.map((cell, k) => h(k ? "td" : "th", { scope: k ? null : "row", class: figure(k) }, cell)));
  };
  return h("div", { class: "scroll" }, h("table", { class: kind }, h("thead", null, h("tr", null, head)), h("tbody", null, rows.map(line))));
}

// Replaces the children of `box`, except equal nodes: they keep focus, selection and a click that
// has begun.
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
// A folded section; `make` returns its nodes when it is first opened.
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

// The address holds the state: #/run/demo?tab=events&kind=candidate
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

// A query value of the address if it is among `values`, else the first of these.
export function placed(name, values) {
  const value = place().query.get(name);
  return values.includes(value) ? value : values[0];
}

// Changes query values of the address in place, without opening a view.
export function note(values) {
  const { parts, query } = place();
  const known = Object.fromEntries([...query.keys()].map((name) => [name, query.getAll(name)]));
  const next = { ...known, ...values };
  history.replaceState(history.state, "", address(parts, next));
}

export function runLink(id, query) {
  return address(["run", id], query);
}

// The name and links to the pages; the link to the list of runs selects `selected` there.
export const brandLine = (here, selected) => h("nav", { class: "brand", "aria-label": "Pages" }, "Rookery", ["runs", "fleet", "service"].map((one) => h("a", { href: address([one], one === "runs" && { sel: selected ?? [] }), "aria-current": one === here ? "page" : null }, one)));

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

// Turns `code` in a sentence into code elements.
export const prose = (text) => (typeof text === "string" ? text.split(/`([^`\n]+)`/).map((part, k) => (k % 2 ? h("code", null, part) : part)) : text);

// A preformatted text. Everything beyond MOST_SHOWN is folded away, because browsers hang on it.
const MOST_SHOWN = 20000;
export const longText = (kind, text) => h("div", null, h("pre", { class: kind }, text.slice(0, MOST_SHOWN)), text.length > MOST_SHOWN && folded(`${text.length - MOST_SHOWN} more characters`, () => h("pre", { class: kind }, text.slice(MOST_SHOWN))));

// Placeholders: a sentence instead of missing content, and an error message.
export const emptyNote = (sentence) => h("p", { class: "empty" }, prose(sentence));
export const errorNote = (error) => h("p", { class: "trouble", role: "alert" }, prose(error?.message ?? String(error)));

// Resolves once the changes are on screen: an earlier request would compete for the processor.
export const drawn = () => new Promise((done) => {
  requestAnimationFrame(() => setTimeout(done));
  setTimeout(done, 200); // a hidden page draws no frames
});
